"""The engine without threads or event loops: add requests, step, take the pieces of answers.

A step is decide, execute, commit: the scheduler plans without tensors, the runner computes without
policy, and what came of it is cut at the first stop and committed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_engine.attribution import row_weight, share_ns
from dflash_engine.config import EngineConfig
from dflash_engine.errors import BadPrompt, BadSampling, PromptTooLong
from dflash_engine.loading import load
from dflash_engine.plan import RowCommit, RowOutput, RowPlan
from dflash_engine.request import Chunk, FinishReason, Request, Result, SamplingParams, TokenLogprob, Usage
from dflash_engine.stats import EngineStats
from dflash_engine.stops import StopWatcher


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been checked: what the scheduler needs."""

    request: Request
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(slots=True)
class _Answer:
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


class EngineCore:
    """One model, its caches and its queue. Not thread-safe. Raises `ConfigError`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        parts = load(config)
        self.fingerprint = parts.fingerprint.digest
        self.block_length = parts.block_length
        self.max_model_len = parts.max_model_len
        self._model = parts.model
        self._eos_token_ids = parts.eos_token_ids
        self._tokenizer = parts.tokenizer
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._answers: dict[int, _Answer] = {}
        self._num_requests = 0
        self._totals = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    def prepare(self, request: Request) -> Prepared:
        """Tokenises and checks; may be called from any thread. Raises `RequestError`."""
        if request.messages is not None:
            prompt = self._tokenizer.encode_chat(request.messages)
        elif request.text is not None:
            prompt = self._tokenizer.encode(request.text)
        else:
            prompt = list(request.token_ids or ())
        self._check_tokens(prompt, request.sampling)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but the model takes {self.max_model_len} in all"
            )
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        max_tokens = min(request.sampling.max_tokens or self.config.default_max_tokens, room)
        return Prepared(request, tuple(prompt), max_tokens, seed)

    def add(self, prepared: Prepared) -> int:
        """Queues a request and returns its sequence id."""
        self._num_requests += 1
        seq_id, sampling = self._num_requests, prepared.request.sampling
        watcher = StopWatcher(self._tokenizer.stream(), sampling, self._eos_token_ids, prepared.max_tokens)
        request_id = prepared.request.request_id or f"request-{seq_id}"
        self._answers[seq_id] = _Answer(request_id, prepared, watcher)
        self._scheduler.add(
            seq_id, prepared.prompt, prepared.max_tokens, sampling, prepared.seed, prepared.request.priority
        )
        return seq_id

    def abort(self, seq_id: int) -> Chunk | None:
        """Ends a request between steps; None where it has ended already."""
        answer = self._answers.pop(seq_id, None)
        if answer is None:
            return None
        answer.cached_tokens = self._scheduler.cached_tokens(seq_id)
        self._scheduler.abort(seq_id)
        return Chunk("", (), self._result(answer, "abort"))

    def step(self) -> list[tuple[int, Chunk]]:
        """One round for everything that runs: pieces of answers by sequence id."""
        began = time.perf_counter_ns()
        plan = self._scheduler.plan()
        if plan is None:
            return []
        output = self._runner.execute(plan)
        advanced = [self._advance(row, out) for row, out in zip(plan.rows, output.rows, strict=True)]
        self._scheduler.commit([commit for commit, _, _ in advanced])
        busy_ns = time.perf_counter_ns() - began
        self._charge(busy_ns, plan.rows, output.rows, [commit for commit, _, _ in advanced])
        chunks = []
        for commit, text, finish in advanced:
            result = self._result(self._answers.pop(commit.seq_id), finish) if finish else None
            if result is not None or text or commit.tokens:
                chunks.append((commit.seq_id, Chunk(text, commit.tokens, result)))
        if not self._answers:
            self._scheduler.check_integrity()
        return chunks

    def stats(self) -> EngineStats:
        return self._totals

    def _check_tokens(self, prompt: list[int], sampling: SamplingParams) -> None:
        vocab = self._model.vocab_size
        if not prompt:
            raise BadPrompt("the prompt is empty")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise BadPrompt(f"prompt token ids must lie in 0..{vocab - 1}")
        for name, tokens in (
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise BadSampling(f"{name}: token {token} does not exist; ids are 0..{vocab - 1}")

    def _advance(self, row: RowPlan, output: RowOutput) -> tuple[RowCommit, str, FinishReason | None]:
        """Cuts what the target chose at the first stop and books it."""
        answer = self._answers[row.seq_id]
        accepted = answer.watcher.accept(output.tokens)
        kept = output.tokens[: accepted.kept]
        if answer.tokens and row.sample:
            answer.steps += 1
        answer.drafted_tokens += output.num_drafted
        commit = RowCommit(row.seq_id, kept, accepted.finish is not None)
        answer.accepted_tokens += _num_accepted(output, commit)
        answer.tokens.extend(kept)
        answer.logprobs.extend(output.logprobs[: accepted.kept])
        answer.pieces.append(accepted.text)
        answer.cached_tokens = self._scheduler.cached_tokens(row.seq_id)
        return commit, accepted.text, accepted.finish

    def _charge(
        self,
        busy_ns: int,
        rows: Sequence[RowPlan],
        outputs: Sequence[RowOutput],
        commits: Sequence[RowCommit],
    ) -> None:
        for row, share in zip(rows, share_ns(busy_ns, [row_weight(row) for row in rows]), strict=True):
            self._answers[row.seq_id].busy_ns += share
        scheduler, totals = self._scheduler.stats(), self._totals
        self._totals = EngineStats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            preemptions=scheduler.preemptions,
            steps=totals.steps + 1,
            busy_ns=totals.busy_ns + busy_ns,
            prompt_tokens=totals.prompt_tokens + sum(_num_prompt_tokens(row) for row in rows),
            completion_tokens=totals.completion_tokens + sum(len(commit.tokens) for commit in commits),
            drafted_tokens=totals.drafted_tokens + sum(out.num_drafted for out in outputs),
            accepted_tokens=totals.accepted_tokens + sum(map(_num_accepted, outputs, commits)),
        )

    def _result(self, answer: _Answer, finish: FinishReason) -> Result:
        wants_logprobs = answer.prepared.request.sampling.logprobs is not None
        return Result(
            request_id=answer.request_id,
            text="".join(answer.pieces),
            tokens=tuple(answer.tokens),
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=len(answer.prepared.prompt),
                cached_tokens=answer.cached_tokens,
                completion_tokens=len(answer.tokens),
                steps=answer.steps,
                drafted_tokens=answer.drafted_tokens,
                accepted_tokens=answer.accepted_tokens,
                busy_ns=answer.busy_ns,
            ),
            seed=answer.prepared.seed,
            logprobs=tuple(answer.logprobs) if wants_logprobs else None,
            fingerprint=self.fingerprint,
        )


def _num_accepted(output: RowOutput, commit: RowCommit) -> int:
    """Guesses that stand in the answer: not the target's own token, nor what a stop cut off."""
    return min(len(commit.tokens), max(len(output.tokens) - 1, 0))


def _num_prompt_tokens(row: RowPlan) -> int:
    return max(min(row.start + len(row.tokens), len(row.prompt)) - row.start, 0)
