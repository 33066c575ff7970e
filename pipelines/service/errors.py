"""Refusals of the service, and the form that each API gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from dflash_engine.errors import EngineDead, PromptTooLong, RequestError

Form = Literal["openai", "anthropic"]

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200: status, message, and OpenAI's `code` and `param`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, where waiting helps."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    def body(self, form: Form, request_id: str | None = None) -> dict[str, Any]:
        if form == "openai":
            kind = _OPENAI_TYPES.get(self.status)
            kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
            return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        kind = _ANTHROPIC_TYPES.get(self.status)
        kind = kind or ("api_error" if self.status >= 500 else "invalid_request_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": self._anthropic_message()},
            "request_id": request_id,
        }

    def _anthropic_message(self) -> str:
        return self.message


class ContextExceeded(ApiError):
    """The prompt does not fit into the model's context; both numbers are in the message."""

    def __init__(self, prompt_tokens: int, max_model_len: int, param: str) -> None:
        super().__init__(
            400,
            f"maximum context length is {max_model_len} tokens, but the prompt has {prompt_tokens}, "
            "which leaves no room for an answer; shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len

    def _anthropic_message(self) -> str:
        # Claude Code looks for this wording before it compacts the conversation.
        return f"prompt is too long: {self.prompt_tokens} tokens > {self.max_model_len - 1} maximum"


class EngineBusy(Exception):
    """Raised by an engine client whose queue is full; the way in for Ray Serve's back-pressure."""

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A field that would change the answer and cannot be honoured."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported_parameter")


def queue_full(retry_after_s: float) -> ApiError:
    return ApiError(
        429, "too many requests are waiting; try again later", code="queue_full", retry_after_s=retry_after_s
    )


def as_api_error(error: Exception) -> ApiError | None:
    """What a client is told of an error of the engine; None for one that nobody expected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLong):
        return invalid(str(error), code=error.code)
    if isinstance(error, RequestError):
        return invalid(str(error), code=error.code)
    if isinstance(error, EngineBusy):
        return queue_full(error.retry_after_s)
    if isinstance(error, EngineDead):
        # What went wrong inside is for the log, not for clients.
        return ApiError(503, "the engine has stopped; try again", code="engine_dead", retry_after_s=5)
    return None


def error_form(path: str, headers: Mapping[str, str]) -> Form:
    """Whose form an error takes: every Anthropic client names its version."""
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        return "anthropic"
    return "openai"
