"""A text completion in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from dflash_engine.request import Result
from pipelines.service import openai_chat, openai_completions, sse
from pipelines.service.generation import Call, Piece
from pipelines.service.keys import Owner
from pipelines.service.openai_body import TextBody
from pipelines.service.openai_logprobs import Pending, text_logprobs
from pipelines.service.openai_sampling import checked_n, sampling_params
from pipelines.service.reading import begun, completed
from pipelines.service.replies import json_reply, stream_reply
from pipelines.service.service import Service


@dataclass(frozen=True, slots=True)
class TextReply:
    """One text completion, of one prompt or several, whole or as a stream."""

    service: Service
    body: TextBody
    owner: Owner
    request_id: str

    async def reply(self, stack: AsyncExitStack) -> Response:
        openai_completions.check_supported(self.body)
        tokenizer, config = self.service.model.tokenizer, self.service.config
        prompts = await asyncio.to_thread(openai_completions.prompts, self.body, tokenizer.encode)
        for prompt in prompts:
            self.service.check_length(prompt, "prompt")
        num_choices = checked_n(self.body, len(prompts), config.max_choices)
        sampling = sampling_params(
            self.body,
            temperature=config.default_temperature,
            max_tokens=self.body.max_tokens or openai_completions.DEFAULT_MAX_TOKENS,
            logprobs=self.body.logprobs,
        )
        call = Call(prompts, sampling, num_choices)
        pieces = await stack.enter_async_context(
            self.service.answer(call, self.owner, f"cmpl-{self.request_id}")
        )
        if self.body.stream:
            _, pieces = await begun(pieces)
            stream = self._stream(pieces, num_choices)
            return stream_reply(stream, "openai", self.request_id)
        results: dict[int, Result] = {}
        async for index, chunk in pieces:
            if chunk.result is not None:
                results[index] = completed(chunk.result)
        choices = [self._choice(index, results[index]) for index in sorted(results)]
        return json_reply(self._object(int(time.time()), choices, _usage(results, num_choices)))

    async def _stream(self, pieces: AsyncIterator[Piece], num_choices: int) -> AsyncIterator[bytes]:
        created_s = int(time.time())
        results: dict[int, Result] = {}

        def event(choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
            made = self._object(created_s, choices, used)
            if not self.body.include_usage:  # some clients fail at a usage that they did not ask for
                del made["usage"]
            return sse.data(made)

        token_bytes = self.service.model.tokenizer.token_bytes
        pending: defaultdict[int, Pending] = defaultdict(Pending)
        async for index, chunk in pieces:
            pending[index].add(chunk.logprobs)
            if chunk.text:
                logprobs = pending[index].for_text(token_bytes)
                yield event([openai_completions.choice(index, chunk.text, None, logprobs, None)])
            if chunk.result is not None:
                result = results[index] = completed(chunk.result)
                logprobs = pending[index].for_text(token_bytes)
                yield event(
                    [openai_completions.choice(index, "", result.finish_reason, logprobs, result.seed)]
                )
        if self.body.include_usage:
            yield event([], _usage(results, num_choices))
        yield sse.DONE

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs = None
        if result.logprobs is not None:
            logprobs = text_logprobs(result.logprobs, self.service.model.tokenizer.token_bytes)
        return openai_completions.choice(index, result.text, result.finish_reason, logprobs, result.seed)

    def _object(
        self, created_s: int, choices: list[dict[str, Any]], used: dict[str, Any] | None
    ) -> dict[str, Any]:
        response_id = f"cmpl-{self.request_id}"
        return openai_completions.completion(self.body, response_id, created_s, choices, used)


def _usage(results: dict[int, Result], num_choices: int) -> dict[str, Any]:
    return openai_chat.usage([results[index].usage for index in sorted(results)], num_choices)
