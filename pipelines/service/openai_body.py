"""What OpenAI's clients send, as in the API reference, with this project's sampling fields beside it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from pipelines.service.body import Body

MAX_STOPS = 16
"""OpenAI takes 4; each is looked for in every piece of text."""


class TextPart(Body):
    type: str
    text: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class AssistantCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of a streamed call that a client sends back as it came


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Of answers that clients send back; they change nothing here.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: None = None


class Function(Body):
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    # This project's own: `block_tokens` beside the first delta of each verify pass, an empty one if need be.
    include_blocks: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class GenerationBody(Body):
    """Fields of both endpoints."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # This project's own.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Accepted, and without effect on the answer.
    user: str | None = None

    @field_validator("stop")
    @classmethod
    def _not_too_many_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise ValueError(f"{len(value)} stop texts; {MAX_STOPS} are the most")
        return value

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_blocks(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_blocks)


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # Accepted, and without effect on the answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    verbosity: str | None = None
    prediction: Any = None
    # Would change the answer, and cannot be done.
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None


class TextBody(GenerationBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=5)
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
