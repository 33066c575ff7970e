"""One request on its way through the engine, and the result it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dflash_engine.grammar import Grammar
from dflash_engine.plan import RowCommit, RowOutput, RowPlan
from dflash_engine.request import FinishReason, Request, Result, TokenLogprob, Usage
from dflash_engine.stops import StopWatcher


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been checked: what the scheduler needs."""

    request: Request
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    grammar: Grammar | None = None


class Advance(NamedTuple):
    """What one row brought an answer."""

    commit: RowCommit
    text: str = ""
    """That can be shown now."""
    finish: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, eq=False)
class Answer:
    """One request's answer so far."""

    request_id: str
    prepared: Prepared
    watcher: StopWatcher
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_ns: int = 0

    def advance(self, row: RowPlan, output: RowOutput) -> Advance:
        """Cuts what the target chose at the first stop and books it."""
        if not row.sample:
            return Advance(RowCommit(row.seq_id, (), False))
        tokens = output.tokens
        num_kept, text, finish = self.watcher.accept(tokens)
        # The first token comes from prefill, which is no verify step.
        self.steps += bool(self.tokens)
        # Guesses that stand in the answer: not the target's own token, nor what a stop cut off.
        num_accepted = min(num_kept, len(tokens) - 1)
        self.drafted_tokens += output.num_drafted
        self.accepted_tokens += num_accepted
        if num_kept < len(tokens):
            tokens = tokens[:num_kept]
        self.tokens += tokens
        logprobs = output.logprobs
        if logprobs:
            logprobs = logprobs[:num_kept]
            self.logprobs += logprobs
        if text:
            self.pieces.append(text)
        commit = RowCommit(row.seq_id, tokens, finish is not None)
        return Advance(commit, text, finish, output.num_drafted, num_accepted, logprobs)

    def flush(self) -> str:
        """Ends the answer from outside, and gives the text that was held back so far."""
        text = self.watcher.flush()
        if text:
            self.pieces.append(text)
        return text

    def result(self, finish: FinishReason, fingerprint: str) -> Result:
        wants_logprobs = self.prepared.request.sampling.logprobs is not None
        return Result(
            request_id=self.request_id,
            text="".join(self.pieces),
            tokens=tuple(self.tokens),
            finish_reason=finish,
            matched_stop=self.watcher.matched,
            usage=Usage(
                prompt_tokens=len(self.prepared.prompt),
                cached_tokens=self.cached_tokens,
                completion_tokens=len(self.tokens),
                steps=self.steps,
                drafted_tokens=self.drafted_tokens,
                accepted_tokens=self.accepted_tokens,
                busy_ns=self.busy_ns,
            ),
            seed=self.prepared.seed,
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
            fingerprint=fingerprint,
        )
