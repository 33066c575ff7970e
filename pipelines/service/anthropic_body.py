"""What Anthropic's clients send, as in the API reference and in what Claude Code adds to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pipelines.service.body import Body


class Block(Body):
    """A piece of content, of any type; which fields count depends on the type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    # Without effect on a local model's answer.
    signature: str | None = None
    data: Any = None
    source: Any = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None
    toolset_name: Any = None


class ChatTurn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(Body):
    """A tool that the client runs; those that the service would run have other types."""

    name: str = Field(min_length=1, max_length=128)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # Without effect on a local model's answer.
    cache_control: Any = None
    eager_input_streaming: Any = None
    defer_loading: Any = None
    input_examples: Any = None
    allowed_callers: Any = None
    # Of the service's own tools, so that the refusal names the type and not these.
    max_uses: Any = None
    allowed_domains: Any = None
    blocked_domains: Any = None
    user_location: Any = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=1024)
    display: str | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """What makes the prompt: all of a body for count_tokens."""

    model: str
    messages: list[ChatTurn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Without effect on a local model's answer.
    cache_control: Any = None
    context_management: Any = None
    speed: str | None = None
    # Would change the answer, and cannot be done.
    mcp_servers: list[Any] | None = None


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(default=None, max_length=64)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    # Without effect on a local model's answer.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Would change the answer, and cannot be done.
    container: Any = None
