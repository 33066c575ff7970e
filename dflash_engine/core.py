"""The engine without threads or event loops: add requests, step, take the pieces of answers.

A step is decide, execute, commit: the scheduler plans without tensors, the runner computes without
policy, and what came of it is cut at the first stop and committed. With a runner that goes ahead, a step
commits the round before the one that it launched.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from dflash_engine.answer import Advance, Answer, Prepared
from dflash_engine.attribution import row_weight, share_ns
from dflash_engine.config import EngineConfig
from dflash_engine.draft_policy import Outcome
from dflash_engine.errors import BadPrompt, BadSampling
from dflash_engine.loading import load
from dflash_engine.ops import MAX_BIAS
from dflash_engine.pipeline import Pipeline
from dflash_engine.plan import RowPlan, StepOutput, StepPlan
from dflash_engine.prompt_encoder import PromptEncoder
from dflash_engine.request import Chunk, Request, SamplingParams
from dflash_engine.stats import EngineStats
from dflash_engine.stops import StopWatcher

__all__ = ["EngineCore", "Prepared"]


LEARN_EVERY = 4
"""Rounds of which one is told of to those who decide; half as often where there are only one or two rows."""


class EngineCore:
    """One model, its caches and its queue. Not thread-safe. Raises `ConfigError`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        parts = load(config)
        self.fingerprint = parts.fingerprint.digest
        self.block_length = parts.block_length
        self.max_model_len = parts.max_model_len
        self.memory = parts.memory
        self._model = parts.model
        self._eos_token_ids = parts.eos_token_ids
        self._tokenizer = parts.tokenizer
        self._encoder = PromptEncoder(parts.tokenizer, parts.max_model_len)
        self._grammars = parts.grammars
        self._scheduler = parts.scheduler
        self._pipeline = Pipeline(parts.runner)
        self._policy = parts.policy
        self._times = parts.times
        self._unlearnt_rounds = 0
        self._answers: dict[int, Answer] = {}
        self._num_requests = 0
        self._totals = EngineStats()
        self._num_blocks = parts.scheduler.stats().free_blocks
        # Since when time in steps is charged to no round, and such time of steps that committed none.
        self._since_ns = 0
        self._carried_ns = 0

    @property
    def has_work(self) -> bool:
        """True until every answer is given and no round is in flight."""
        return bool(self._answers) or self._pipeline.in_flight > 0

    def prepare(self, request: Request) -> Prepared:
        """Tokenises, checks, and compiles a grammar that is new; may be called from any thread. Raises
        `RequestError`."""
        prompt = self._encoder.encode(request)
        self._check_tokens(prompt, request.sampling)
        room = self.max_model_len - len(prompt)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)
        max_tokens = min(request.sampling.max_tokens or self.config.default_max_tokens, room)
        text = request.sampling.grammar
        grammar = self._grammars.compile(text) if text is not None else None
        return Prepared(request, tuple(prompt), max_tokens, seed, grammar)

    def add(self, prepared: Prepared) -> int:
        """Queues a request and returns its sequence id."""
        self._num_requests += 1
        seq_id, sampling = self._num_requests, prepared.request.sampling
        watcher = StopWatcher(self._tokenizer.stream(), sampling, self._eos_token_ids, prepared.max_tokens)
        request_id = prepared.request.request_id or f"request-{seq_id}"
        self._answers[seq_id] = Answer(request_id, prepared, watcher)
        if prepared.grammar is not None:
            self._grammars.begin(seq_id, prepared.grammar)
        self._scheduler.add(
            seq_id,
            prepared.prompt,
            prepared.max_tokens,
            sampling,
            prepared.seed,
            prepared.request.priority,
            prepared.request.cache_salt,
        )
        return seq_id

    def abort(self, seq_id: int) -> Chunk | None:
        """Ends a request between steps; None where it has ended already."""
        if seq_id not in self._answers:
            return None
        answer = self._end(seq_id)
        answer.cached_tokens = self._scheduler.cached_tokens(seq_id)
        self._scheduler.abort(seq_id)
        text = answer.flush()
        return Chunk(text, (), answer.result("abort", self.fingerprint), answer.cached_tokens)

    def step(self) -> list[tuple[int, Chunk]]:
        """One round for everything that runs: pieces of answers by sequence id.

        There may be none while the first round is on its way.
        """
        self._since_ns = time.perf_counter_ns()
        chunks: list[tuple[int, Chunk]] = []
        num_committed = 0
        for plan, output in self._pipeline.rounds(self._scheduler.plan()):
            chunks += self._commit(plan, output)
            num_committed += 1
        if not self._answers:
            for plan, output in self._pipeline.drain():
                self._commit(plan, output)
            self._scheduler.check_idle()
        elif self._pipeline.in_flight and not num_committed:
            self._carried_ns = self._lap_ns()
        return chunks

    def stats(self) -> EngineStats:
        """From any thread. What runs and waits is asked now: an abort changes it without a round."""
        scheduler = self._scheduler.stats()
        return replace(
            self._totals,
            waiting=scheduler.waiting,
            running=scheduler.running,
            preemptions=scheduler.preemptions,
            kv_usage=1 - scheduler.free_blocks / self._num_blocks,
        )

    def _check_tokens(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        vocab = self._model.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            raise BadPrompt(f"prompt token ids must lie in 0..{vocab - 1}")
        if len(sampling.logit_bias) > MAX_BIAS:
            raise BadSampling(f"logit_bias has {len(sampling.logit_bias)} tokens; {MAX_BIAS} are the most")
        for name, tokens in (
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise BadSampling(f"{name}: token {token} does not exist; ids are 0..{vocab - 1}")

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[tuple[int, Chunk]]:
        """Books what came of a round, and says what is new of each answer.

        Rows of requests that have ended since the round was planned are thrown away.
        """
        advances: list[Advance] = []
        paying: list[Answer | None] = []
        for row, out in zip(plan.rows, output.rows, strict=True):
            answer = self._answers.get(row.seq_id)
            paying.append(answer)
            if answer is not None:
                if not answer.tokens:
                    answer.cached_tokens = self._scheduler.cached_tokens(row.seq_id)
                advances.append(answer.advance(row, out))
        self._scheduler.commit([advance.commit for advance in advances])
        lap_ns = self._lap_ns()
        self._unlearnt_rounds += 1
        if self._unlearnt_rounds >= (LEARN_EVERY if len(plan.rows) > 2 else 2 * LEARN_EVERY):
            self._unlearnt_rounds = 0
            # Where the host is slower than the device, it decides what a round takes.
            self._learn(plan, output, paying, max(output.busy_ns or 0, lap_ns))
        self._charge(lap_ns if output.busy_ns is None else output.busy_ns, plan.rows, paying)
        self._count(advances)
        chunks = []
        for (seq_id, tokens, _), text, finish, _, _, logprobs in advances:
            if not tokens:
                continue
            answer, result = self._answers[seq_id], None
            if finish is not None:
                result = self._end(seq_id).result(finish, self.fingerprint)
            chunks.append((seq_id, Chunk(text, tokens, result, answer.cached_tokens, logprobs)))
        return chunks

    def _end(self, seq_id: int) -> Answer:
        if self._policy is not None:
            self._policy.forget(seq_id)
        self._grammars.end(seq_id)
        return self._answers.pop(seq_id)

    def _learn(self, plan: StepPlan, output: StepOutput, paying: list[Answer | None], round_ns: int) -> None:
        """Tells the policy what a round's drafts were worth and what it took; now and then only, since that
        costs the host a good part of a short round. Without a policy what it took still says how much of a
        round batch may have."""
        if self._policy is None:
            drafts = [row.num_draft for row in plan.rows]
            num_tokens = sum([row.num_tokens for row in plan.rows]) + sum(drafts)
            num_drafting = len(drafts) - drafts.count(0)
            self._times.observe_round(
                num_tokens, len(drafts), num_drafting, plan.write_context, round_ns / 1e9
            )
            return
        outcomes = []
        other_tokens = 0
        for row, out, answer in zip(plan.rows, output.rows, paying, strict=True):
            if answer is None or not row.sample or row.num_tokens > 1 or not (row.ahead or row.num_draft):
                other_tokens += row.num_tokens + row.num_draft
            else:
                outcomes.append(Outcome(row.seq_id, row.num_draft, len(out.tokens) - 1))
        self._policy.observe_round(outcomes, other_tokens, plan.write_context, round_ns / 1e9)

    def _lap_ns(self) -> int:
        """Time in steps since this was last asked."""
        now = time.perf_counter_ns()
        lap_ns = self._carried_ns + now - self._since_ns
        self._carried_ns, self._since_ns = 0, now
        return lap_ns

    def _charge(self, busy_ns: int, rows: tuple[RowPlan, ...], paying: list[Answer | None]) -> None:
        """Shares a round's time among its rows; what was thrown away has no one to pay for it."""
        discarded_ns = discarded_tokens = prompt_tokens = 0
        shares = share_ns(busy_ns, [row_weight(row) for row in rows])
        for row, share, answer in zip(rows, shares, paying, strict=True):
            if answer is None:
                discarded_ns += share
                discarded_tokens += row.num_tokens + row.num_draft
            else:
                answer.busy_ns += share
                prompt_tokens += max(min(row.start + len(row.tokens), len(row.prompt)) - row.start, 0)
        totals = self._totals
        self._totals = replace(
            totals,
            steps=totals.steps + 1,
            busy_ns=totals.busy_ns + busy_ns,
            discarded_ns=totals.discarded_ns + discarded_ns,
            discarded_tokens=totals.discarded_tokens + discarded_tokens,
            prompt_tokens=totals.prompt_tokens + prompt_tokens,
        )

    def _count(self, advances: list[Advance]) -> None:
        totals = self._totals
        self._totals = replace(
            totals,
            completion_tokens=totals.completion_tokens + sum([len(each.commit.tokens) for each in advances]),
            drafts=totals.drafts + sum([each.num_drafted > 0 for each in advances]),
            drafted_tokens=totals.drafted_tokens + sum([each.num_drafted for each in advances]),
            accepted_tokens=totals.accepted_tokens + sum([each.num_accepted for each in advances]),
        )
