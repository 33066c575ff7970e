"""Measures engines on the same prompts: so many requests always in flight, and a clock for every token."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dflash_engine.errors import ConfigError
from dflash_engine.memory import MemoryReport

Prompt = tuple[int, ...]
"""Token ids, the same for everyone who is measured."""


class Piece(NamedTuple):
    """New tokens of one request."""

    key: Hashable
    tokens: Sequence[int]
    done: bool
    at_s: float
    """When they were there, by `time.perf_counter`."""


class Counts(NamedTuple):
    """Since the start: verify steps of requests (the first token's is none), and their drafts."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Contender(Protocol):
    """What can be measured."""

    @property
    def counts(self) -> Counts: ...

    @property
    def memory(self) -> MemoryReport | None: ...

    def submit(self, prompt: Prompt, max_tokens: int) -> Hashable:
        """Starts a request, and gives the key of its pieces."""
        ...

    def step(self) -> list[Piece]: ...

    def abort(self, keys: Sequence[Hashable]) -> None:
        """Ends these requests, which are all that run."""
        ...

    def close(self) -> None:
        """Gives back the device's memory."""
        ...


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of generating that is compared with others."""

    name: str
    make: Callable[[float], Contender]
    """Takes the fraction of the GPU's memory that may be taken by it and all that was built before it."""
    exact: bool = False
    """Whether its answers have to be those of plain decoding."""
    most_at_once: int | None = None
    alone: bool = False
    """It bears no other engine beside it in its process."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, and when it came, in seconds of one clock."""

    tokens: tuple[int, ...]
    submitted_s: float
    first_s: float
    last_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """The answers to some prompts, in their order."""

    answers: tuple[Timed, ...]
    counts: Counts

    @property
    def elapsed_s(self) -> float:
        """From the first submission to the last token."""
        first = min(answer.submitted_s for answer in self.answers)
        return max(answer.last_s for answer in self.answers) - first


def release() -> None:
    """Gives unused memory back to the device, where there is one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(contender: Contender, prompts: Sequence[Prompt], max_tokens: int, concurrency: int) -> Run:
    """Answers all prompts with `concurrency` of them in flight as long as there are so many left."""
    before = contender.counts
    waiting = iter(enumerate(prompts))
    index_of: dict[Hashable, int] = {}
    submitted = [0.0] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    moments: list[list[float]] = [[] for _ in prompts]

    def fill() -> None:
        for index, prompt in itertools.islice(waiting, concurrency - len(index_of)):
            submitted[index] = time.perf_counter()
            index_of[contender.submit(prompt, max_tokens)] = index

    fill()
    while index_of:
        for key, new, done, at_s in contender.step():
            index = index_of.pop(key) if done else index_of[key]
            tokens[index].extend(new)
            moments[index].append(at_s)
        fill()
    answers = tuple(
        Timed(tuple(said), start, at[0], at[-1])
        for said, start, at in zip(tokens, submitted, moments, strict=True)
    )
    counts = Counts(*(after - then for after, then in zip(contender.counts, before, strict=True)))
    return Run(answers, counts)


def figures(measured: Run) -> dict[str, Any]:
    """Speed, delay and drafts of a run; seconds, and None where there is nothing to tell."""
    answers, (steps, drafted, accepted) = measured.answers, measured.counts
    num_tokens = sum(len(answer.tokens) for answer in answers)
    delays = [answer.first_s - answer.submitted_s for answer in answers]
    paces = [
        (answer.last_s - answer.first_s) / (len(answer.tokens) - 1)
        for answer in answers
        if len(answer.tokens) > 1
    ]
    return {
        "completion_tokens": num_tokens,
        "elapsed_s": measured.elapsed_s,
        "tokens_per_s": num_tokens / measured.elapsed_s,
        "ttft_s": statistics.median(delays),
        "ttft_p95_s": percentile(delays, 0.95),
        "time_per_token_s": statistics.median(paces) if paces else None,
        "acceptance_length": (accepted + steps) / steps if steps else None,
        "drafted_per_step": drafted / steps if steps else None,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def stall(
    contender: Contender, streams: Sequence[Prompt], long: Prompt, wanted: StallPlan
) -> dict[str, float]:
    """What streams feel of a long prompt that arrives among them: their longest gap until it is answered.

    It is compared with the median gap between the pieces before. Raises `ConfigError` where streams end.
    """
    moments = {contender.submit(prompt, wanted.max_tokens): list[float]() for prompt in streams}

    def step() -> set[Hashable]:
        pieces = contender.step()
        for piece in pieces:
            if piece.key in moments:
                moments[piece.key].append(piece.at_s)
                if piece.done:
                    raise ConfigError(f"--stall: a stream ended after {wanted.max_tokens} tokens, too early")
        return {piece.key for piece in pieces}

    while min(map(len, moments.values())) < wanted.pieces:
        step()
    usual = statistics.median([gap for at in moments.values() for gap in _gaps(at[1:])])
    last_before = {key: len(at) - 1 for key, at in moments.items()}
    arrived = time.perf_counter()
    key = contender.submit(long, 2)
    while key not in step():
        pass
    answered = time.perf_counter()
    longest = max(max(_gaps(at[last_before[stream] :]), default=0.0) for stream, at in moments.items())
    contender.abort([*moments, key])
    return {
        "usual_gap_s": usual,
        "longest_gap_s": longest,
        "times_usual": longest / usual,
        "long_prompt_ttft_s": answered - arrived,
    }


class StallPlan(NamedTuple):
    """Of each stream."""

    pieces: int
    """Before the long prompt arrives."""
    max_tokens: int


def _gaps(moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(moments)]
