"""A message in Anthropic's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.responses import Response

from dflash_engine.request import SamplingParams, Usage
from pipelines.service import anthropic_messages, anthropic_prompt, sse
from pipelines.service.anthropic_body import MessagesBody, PromptBody
from pipelines.service.body import compact
from pipelines.service.dialect import PLAIN
from pipelines.service.engine_client import ChatPrompt, ChatTokenizer
from pipelines.service.forced_calls import CallParser
from pipelines.service.generation import Call, Piece
from pipelines.service.keys import Owner
from pipelines.service.output import OutputParser
from pipelines.service.reading import ChoiceReader, begun
from pipelines.service.replies import json_reply, stream_reply
from pipelines.service.service import Service


@dataclass(frozen=True, slots=True)
class MessageReply:
    """One message, whole or as a stream."""

    service: Service
    body: MessagesBody
    owner: Owner
    request_id: str

    async def reply(self, stack: AsyncExitStack) -> Response:
        tokenizer = self.service.model.tokenizer
        anthropic_prompt.check_supported(self.body, tokenizer.dialect)
        prompt = await asyncio.to_thread(encode_prompt, self.body, tokenizer)
        self.service.check_length(prompt.tokens, "messages")
        call = Call((prompt.tokens,), self._sampling())
        pieces = await stack.enter_async_context(self.service.answer(call, self.owner, self._message_id))
        reader = ChoiceReader(self._parser(prompt))
        if self.body.stream:
            first, pieces = await begun(pieces)
            used = Usage(prompt_tokens=len(prompt.tokens), cached_tokens=first.chunk.cached_tokens)
            return stream_reply(self._stream(pieces, reader, used), "anthropic", self.request_id)
        async for _, chunk in pieces:
            reader.read(chunk)
        return json_reply(
            anthropic_messages.message(
                self._message_id, self.body.model, reader.parts, self._stop(reader), reader.ended.usage
            )
        )

    @property
    def _message_id(self) -> str:
        return f"msg_{self.request_id}"

    async def _stream(
        self, pieces: AsyncIterator[Piece], reader: ChoiceReader, prompt: Usage
    ) -> AsyncIterator[bytes]:
        writer = anthropic_messages.EventWriter(self._message_id, self.body.model, prompt)
        for event in writer.start():
            yield sse.event(event)
        async for _, chunk in pieces:
            for part in reader.read(chunk):
                for event in writer.part(part):
                    yield sse.event(event)
        for event in writer.end(self._stop(reader), reader.ended.usage):
            yield sse.event(event)

    def _stop(self, reader: ChoiceReader) -> tuple[str, str | None]:
        return anthropic_messages.stop_reason(
            reader.ended, has_calls=reader.has_calls, max_tokens=self.body.max_tokens
        )

    def _parser(self, prompt: ChatPrompt) -> OutputParser | CallParser:
        if anthropic_prompt.forced(self.body):
            return CallParser()
        if anthropic_prompt.schema(self.body) is not None:
            return OutputParser(PLAIN)
        choice = self.body.tool_choice
        return OutputParser(
            self.service.model.tokenizer.dialect,
            thinking=prompt.thinking,
            has_tools=bool(anthropic_prompt.tools(self.body)),
            single_call=bool(choice and choice.disable_parallel_tool_use),
        )

    def _sampling(self) -> SamplingParams:
        body, config = self.body, self.service.config
        values = compact(
            {
                "top_p": body.top_p or None,
                "top_k": body.top_k,
                "stop": body.stop_sequences,
                "json_schema": anthropic_prompt.schema(body),
            }
        )
        if body.top_p == 0:
            values["top_k"] = 1  # nothing but the best token
        temperature = config.default_temperature if body.temperature is None else body.temperature
        return SamplingParams(temperature=temperature, max_tokens=body.max_tokens, **values)


def encode_prompt(body: PromptBody, tokenizer: ChatTokenizer) -> ChatPrompt:
    """The body's prompt as token ids. Raises `ApiError` and `BadPrompt`."""
    return tokenizer.encode_chat(
        anthropic_prompt.turns(body, tokenizer.dialect),
        anthropic_prompt.tools(body),
        anthropic_prompt.template_options(body, tokenizer.dialect),
    )
