"""What goes into an engine and what comes out: plain immutable values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dflash_engine.errors import BadPrompt, BadSampling, RequestError, describe
from dflash_engine.grammar_text import MAX_GRAMMAR_CHARS, GrammarText, schema_text

FinishReason = Literal["stop", "length", "abort", "error"]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class Priority(enum.IntEnum):
    """Order of admission; lower goes first."""

    ONLINE = 0
    BATCH = 1


class SamplingParams(BaseModel):
    """How each token is chosen, and when to stop.

    Raises `BadSampling` that names the field. The choice at a position is a pure function of the
    logits there, the seed and the position, so it is the same with or without a draft.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0)
    """Keep the k best tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Mapping[int, float] = Field(default_factory=dict)
    """Added to the logits of these token ids, -100 to 100."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Log probabilities of the chosen token and of this many best ones."""
    json_schema: str | None = None
    """The answer is JSON of this schema, on one line; given as an object or its JSON text. Properties that
    the schema does not name are allowed unless `additionalProperties` is false, as in JSON Schema."""
    regex: str | None = None
    """The answer as a whole matches this regular expression (Rust's syntax, which has no look-around)."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise BadSampling(describe(error.errors())) from error

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _stops_have_text(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError("a stop text may not be empty")
        return value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_keys_are_token_ids(cls, value: object) -> object:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            return value
        try:
            return {int(token): float(bias) for token, bias in value.items()}
        except (TypeError, ValueError) as error:
            raise ValueError("needs token ids as keys and numbers as values") from error

    @field_validator("logit_bias")
    @classmethod
    def _bias_in_range(cls, value: Mapping[int, float]) -> Mapping[int, float]:
        for token, bias in value.items():
            if token < 0 or not -100 <= bias <= 100:
                raise ValueError(f"token {token} has bias {bias}; ids start at 0, biases lie in -100..100")
        return value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_is_json(cls, value: object) -> object:
        return schema_text(value)

    @field_validator("json_schema", "regex")
    @classmethod
    def _grammars_have_a_limit(cls, value: str | None) -> str | None:
        if value is not None and len(value) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"{len(value)} characters; {MAX_GRAMMAR_CHARS} are the most")
        return value

    @model_validator(mode="after")
    def _one_grammar_with_an_end(self) -> Self:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("json_schema and regex exclude each other")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos goes on behind the end that json_schema and regex have")
        return self

    @property
    def grammar(self) -> GrammarText | None:
        """What the answer has to be a text of, if anything."""
        if self.json_schema is not None:
            return GrammarText("json_schema", self.json_schema)
        return GrammarText("regex", self.regex) if self.regex is not None else None

    @property
    def needs_host(self) -> bool:
        """True where the host takes part in the choice of each token, or looks at it."""
        return self.logprobs is not None or self.json_schema is not None or self.regex is not None

    @property
    def greedy(self) -> bool:
        """True where the best token is taken, without noise."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True where the choice depends on the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; text only."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadPrompt(f"role {self.role!r} is not one of {', '.join(sorted(ROLES))}")
        if not isinstance(self.content, str):
            raise BadPrompt(f"content of role {self.role!r} is {type(self.content).__name__}, not text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt in exactly one of three forms: a conversation, raw text, or token ids.

    A conversation goes through the model's chat template; raw text and ids do not. Turns may be given
    as mappings with role and content. Raises `BadPrompt`.
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    priority: Priority = Priority.BATCH
    cache_salt: str = ""
    """Cached prompts are shared only among requests of one salt; the answer does not depend on it."""

    def __post_init__(self) -> None:
        given = [form for form in (self.messages, self.text, self.token_ids) if form is not None]
        if len(given) != 1:
            raise BadPrompt("a request has exactly one of messages, text and token_ids")
        if not given[0]:
            raise BadPrompt("the prompt is empty")
        # Mostly they are messages already, and a batch job makes two requests of each row.
        if self.messages is not None and (type(self.messages) is not tuple or _has_others(self.messages)):
            object.__setattr__(self, "messages", tuple(_as_message(turn) for turn in self.messages))


def _has_others(turns: Sequence[object]) -> bool:
    return set(map(type, turns)) != {Message}


def _as_message(turn: object) -> Message:
    if isinstance(turn, Message):
        return turn
    if isinstance(turn, Mapping) and "role" in turn and "content" in turn:
        return Message(turn["role"], turn["content"])
    raise BadPrompt("each message is an object with role and content")


PromptLike = str | Sequence[Mapping[str, str]] | Sequence[Message] | Request


def as_request(prompt: PromptLike, sampling: SamplingParams) -> Request:
    """A request from what people pass: text becomes one user turn. Raises `BadPrompt`."""
    if isinstance(prompt, Request):
        return prompt
    if isinstance(prompt, str):
        return Request(messages=(Message("user", prompt),) if prompt else (), sampling=sampling)
    return Request(messages=tuple(_as_message(turn) for turn in prompt), sampling=sampling)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used. `busy_ns` is its share of the engine's step time."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    """Verify steps; the first token comes from prefill and is none."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that stand in the answer; what a stop cut off does not count."""
    busy_ns: int = 0

    @property
    def busy_s(self) -> float:
        return self.busy_ns / 1e9

    @property
    def acceptance_length(self) -> float:
        """Tokens of the answer per verify step, the target's own included; the first token is prefill's."""
        return (self.completion_tokens - 1) / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token under the model, and of the best ones: before temperature, whether a
    grammar allows them or not."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole answer to one request.

    `tokens` holds the stop token where one ended the answer; `text` does not. `seed` is the one
    used, also where the request named none. With `error` set the request was refused and the
    other fields are empty.
    """

    request_id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason = "error"
    matched_stop: str | int | None = None
    """The stop text, or the id of the stop token, that ended the answer; None where it ended otherwise."""
    usage: Usage = Usage()
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    fingerprint: str = ""
    error: RequestError | None = None


class Chunk(NamedTuple):
    """A piece of a streamed answer; the last one carries the result.

    Each row of each step makes one: a named tuple takes a third of a frozen dataclass's time.
    """

    text: str
    tokens: tuple[int, ...]
    result: Result | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache: known with the first piece, and the same in all."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `tokens` where the request asked for them."""
