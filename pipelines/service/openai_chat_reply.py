"""A chat completion in OpenAI's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from dflash_engine.request import SamplingParams
from pipelines.service import openai_chat, sse
from pipelines.service.dialect import PLAIN
from pipelines.service.engine_client import ChatPrompt
from pipelines.service.forced_calls import CallParser, call_schema
from pipelines.service.generation import Call, Piece
from pipelines.service.keys import Owner
from pipelines.service.openai_body import ChatBody
from pipelines.service.openai_logprobs import Pending, chat_logprobs
from pipelines.service.openai_sampling import checked_n, json_constraint, sampling_params
from pipelines.service.output import OutputParser, ToolCall
from pipelines.service.reading import ChoiceReader, begun
from pipelines.service.replies import json_reply, stream_reply
from pipelines.service.service import Service


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One chat completion, whole or as a stream."""

    service: Service
    body: ChatBody
    owner: Owner
    request_id: str

    async def reply(self, stack: AsyncExitStack) -> Response:
        dialect = self.service.model.tokenizer.dialect
        openai_chat.check_supported(self.body, dialect)
        prompt = await asyncio.to_thread(self._encode)
        self.service.check_length(prompt.tokens, "messages")
        num_choices = checked_n(self.body, 1, self.service.config.max_choices)
        call = Call((prompt.tokens,), self._sampling(len(prompt.tokens)), num_choices)
        pieces = await stack.enter_async_context(
            self.service.answer(call, self.owner, f"chatcmpl-{self.request_id}")
        )
        readers = [ChoiceReader(self._parser(prompt)) for _ in range(num_choices)]
        if self.body.stream:
            _, pieces = await begun(pieces)
            stream = self._stream(pieces, readers)
            return stream_reply(stream, "openai", self.request_id)
        async for index, chunk in pieces:
            readers[index].read(chunk)
        choices = [
            openai_chat.choice(index, reader.parts, reader.ended, self._logprobs(reader))
            for index, reader in enumerate(readers)
        ]
        made = openai_chat.completion(
            self.body, f"chatcmpl-{self.request_id}", int(time.time()), choices, _usage(readers)
        )
        return json_reply(made)

    def _encode(self) -> ChatPrompt:
        tokenizer = self.service.model.tokenizer
        return tokenizer.encode_chat(
            openai_chat.turns(self.body.messages),
            openai_chat.tools(self.body),
            openai_chat.template_options(self.body, tokenizer.dialect, constrained=bool(self._constraint())),
        )

    def _sampling(self, prompt_tokens: int) -> SamplingParams:
        config, body = self.service.config, self.body
        room = self.service.model.max_model_len - prompt_tokens
        return sampling_params(
            body,
            temperature=config.default_temperature,
            max_tokens=body.max_completion_tokens or body.max_tokens or config.default_max_tokens or room,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **self._constraint(),
        )

    def _constraint(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that hold the whole answer to a form."""
        if forced := openai_chat.forced(self.body):
            return {"json_schema": call_schema(forced)}
        return json_constraint(self.body.response_format)

    def _parser(self, prompt: ChatPrompt) -> OutputParser | CallParser:
        if openai_chat.forced(self.body):
            return CallParser()
        if self._constraint():
            return OutputParser(PLAIN)
        return OutputParser(
            self.service.model.tokenizer.dialect,
            thinking=prompt.thinking,
            has_tools=bool(openai_chat.tools(self.body)),
            single_call=self.body.parallel_tool_calls is False,
        )

    async def _stream(
        self, pieces: AsyncIterator[Piece], readers: Sequence[ChoiceReader]
    ) -> AsyncIterator[bytes]:
        created_s = int(time.time())

        def event(choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
            chunk = {
                "id": f"chatcmpl-{self.request_id}",
                "object": "chat.completion.chunk",
                "created": created_s,
                "model": self.body.model,
                "choices": choices,
                "system_fingerprint": None,
            }
            # Some clients fail at a usage that they did not ask for.
            return sse.data({**chunk, "usage": used} if self.body.include_usage else chunk)

        token_bytes = self.service.model.tokenizer.token_bytes
        pending = [Pending() for _ in readers]
        for index in range(len(readers)):
            yield event([_streamed(index, {"role": "assistant", "content": ""})])
        async for index, chunk in pieces:
            reader = readers[index]
            num_calls = reader.num_calls
            pending[index].add(chunk.logprobs)
            block = {"block_tokens": len(chunk.tokens)} if self.body.include_blocks and chunk.tokens else {}
            parts = reader.read(chunk)
            if block and not parts:
                yield event([{**_streamed(index, {}), **block}])
            for part in parts:
                delta, logprobs = openai_chat.delta(part, num_calls), pending[index].for_chat(token_bytes)
                yield event([{**_streamed(index, delta, logprobs=logprobs), **block}])
                block = {}
                num_calls += isinstance(part, ToolCall)
            if reader.result is not None:
                reason = openai_chat.finish_reason(reader.ended.finish_reason, reader.has_calls)
                last = _streamed(index, {}, reason, pending[index].for_chat(token_bytes))
                yield event([{**last, "seed": reader.ended.seed}])
        if self.body.include_usage:
            yield event([], _usage(readers))
        yield sse.DONE

    def _logprobs(self, reader: ChoiceReader) -> list[dict[str, Any]] | None:
        items = reader.ended.logprobs
        if not self.body.logprobs or items is None:
            return None
        return chat_logprobs(items, self.service.model.tokenizer.token_bytes)


def _streamed(
    index: int,
    delta: dict[str, Any],
    reason: str | None = None,
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    listed = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"index": index, "delta": delta, "logprobs": listed, "finish_reason": reason}


def _usage(readers: Sequence[ChoiceReader]) -> dict[str, Any]:
    used = [reader.ended.usage for reader in readers]
    return openai_chat.usage(used, len(used), sum(reader.reasoning_tokens for reader in readers))
