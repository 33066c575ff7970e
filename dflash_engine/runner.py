"""Executes a plan: draft, verify in one pass of the target, choose, and give the draft its context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Segment, forward_batch
from dflash_engine.choose import History, choose, guess, logprob
from dflash_engine.grammar import GrammarState
from dflash_engine.grammars import Grammars
from dflash_engine.kv_cache import Caches
from dflash_engine.models.draft import DraftModel
from dflash_engine.models.target import TargetModel
from dflash_engine.plan import RowOutput, RowPlan, StepOutput, StepPlan
from dflash_engine.request import TokenLogprob


class Runner:
    """Models and their caches; decides nothing, keeps nothing of a request."""

    rounds_ahead = 0
    """A step's result is there when `execute` returns; nothing is in flight behind it."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        caches: Caches,
        block_length: int,
        device: torch.device,
        grammars: Grammars | None = None,
        alone: bool = True,
    ) -> None:
        """grammars: with the states of the answers, on the rank that chooses; alone: no other rank drafts the
        same blocks, without the grammars."""
        self._target = target
        self._grammars = grammars
        self._alone = alone
        self._draft = draft
        self._block_size = caches.block_size
        self._block_length = block_length
        self._device = device
        self._cache = caches.target
        self._draft_cache = caches.draft
        self._taps = draft.config.target_layer_ids if draft else ()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        guesses = self._draft_tokens(plan.rows)
        fed = [(*row.tokens, *guesses.get(row.seq_id, ())) for row in plan.rows]
        segments = [
            Segment(row.start, len(tokens), row.block_table)
            for row, tokens in zip(plan.rows, fed, strict=True)
        ]
        batch = forward_batch(
            segments, self._target.spans, self._block_size, self._device, self._target.config.group
        )
        tokens = torch.tensor([token for row in fed for token in row], device=self._device)
        hidden, features = self._target.forward(tokens, batch, self._cache, self._taps)
        outputs = self._choose(plan.rows, fed, hidden)
        if self._draft is not None and plan.write_context:
            self._write_context(plan.rows, outputs, segments, features)
        return StepOutput(outputs)

    def _draft_tokens(self, rows: Sequence[RowPlan]) -> dict[int, list[int]]:
        """seq_id -> drafted tokens, for the rows that ask for some."""
        drafting = [row for row in rows if row.num_draft]
        if not drafting or self._draft is None or self._draft_cache is None:
            return {}
        segments = [Segment(row.start, self._block_length, row.block_table) for row in drafting]
        batch = forward_batch(
            segments, self._draft.spans, self._block_size, self._device, self._draft.config.group
        )
        masks = [self._draft.config.mask_token_id] * (self._block_length - 1)
        blocks = torch.tensor([[row.tokens[-1], *masks] for row in drafting], device=self._device)
        hidden = self._target.embed(blocks.flatten())
        self._draft.forward(hidden, batch, self._draft_cache)
        wanted = [
            index * self._block_length + 1 + offset
            for index, row in enumerate(drafting)
            for offset in range(row.num_draft)
        ]
        logits = self._draft.logits(hidden[wanted], self._target.head)
        best = self._target.best(logits)
        guesses, first = {}, 0
        for row in drafting:
            span = slice(first, first + row.num_draft)
            state = self._grammar_state(row) if self._alone else None
            guesses[row.seq_id] = guess(
                logits[span],
                best[span],
                row.sampling,
                row.seed,
                row.start + 1,
                state.allowed if state is not None else None,
            )
            first = span.stop
        return guesses

    def _choose(
        self, rows: Sequence[RowPlan], fed: Sequence[Sequence[int]], hidden: Tensor
    ) -> tuple[RowOutput, ...]:
        """Each row's longest prefix of guesses that the target would have chosen, and its next choice."""
        last = 0
        wanted: list[int] = []
        for row, tokens in zip(rows, fed, strict=True):
            last += len(tokens)
            if row.sample:
                wanted.extend(range(last - row.num_draft - 1, last))
        logits = self._target.logits(hidden[wanted])
        best = self._target.best(logits)
        outputs, first = [], 0
        for row, tokens in zip(rows, fed, strict=True):
            if not row.sample:
                outputs.append(RowOutput(row.seq_id, (), 0))
                continue
            span = slice(first, first + row.num_draft + 1)
            outputs.append(self._verify(row, tokens[len(row.tokens) :], logits[span], best[span]))
            first = span.stop
        return tuple(outputs)

    def _verify(self, row: RowPlan, guesses: Sequence[int], logits: Tensor, best: Sequence[int]) -> RowOutput:
        sampling = row.sampling
        grammar = self._grammar_state(row)
        if sampling.grammar is not None and grammar is None:
            # Another rank chooses. All guesses count as right here: what is written for wrong ones is written
            # again before it is read.
            return RowOutput(row.seq_id, (*guesses, 0), len(guesses))
        simple = sampling.greedy and not (sampling.logit_bias or sampling.penalised or grammar)
        vocab = logits.shape[1]
        history = History(row.prompt, row.output, vocab, logits.device) if sampling.penalised else None
        position = row.start + len(row.tokens)
        chosen: list[int] = []
        logprobs: list[TokenLogprob] = []
        for index, row_logits in enumerate(logits):
            if simple:
                token = best[index]
            else:
                allowed = grammar.allowed(guesses[:index]) if grammar is not None else None
                token = choose(row_logits, sampling, row.seed, position + index, history, allowed)
            chosen.append(token)
            if sampling.logprobs is not None:
                logprobs.append(logprob(row_logits, token, sampling.logprobs))
            if index == len(guesses) or guesses[index] != token:
                break
            if history is not None:
                history.push(token)
        return RowOutput(row.seq_id, tuple(chosen), len(guesses), tuple(logprobs))

    def _grammar_state(self, row: RowPlan) -> GrammarState | None:
        if self._grammars is None or row.sampling.grammar is None:
            return None
        return self._grammars.state(row.seq_id, row.output)

    def _write_context(
        self,
        rows: Sequence[RowPlan],
        outputs: Sequence[RowOutput],
        segments: Sequence[Segment],
        features: Tensor,
    ) -> None:
        """The draft's keys and values of what was fed and stands: known tokens and accepted guesses."""
        assert self._draft is not None and self._draft_cache is not None
        first = 0
        kept: list[Segment] = []
        standing: list[int] = []
        for row, output, segment in zip(rows, outputs, segments, strict=True):
            num = len(row.tokens) + max(len(output.tokens) - 1, 0)
            kept.append(Segment(row.start, num, row.block_table))
            standing.extend(range(first, first + num))
            first += segment.num_tokens
        batch: ForwardBatch = forward_batch(kept, frozenset(), self._block_size, self._device)
        self._draft.write_context(features[standing], batch.positions, batch.slots, self._draft_cache)
