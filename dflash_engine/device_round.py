"""What a round does on the device: draft, verify and accept, and the draft's context.

Three pieces, each a function of tensors that stay in place, so that each can be captured in a graph. The
state by slot (`slots.py`) carries a sequence from round to round without the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_engine.batching import ForwardBatch, Span
from dflash_engine.kv_cache import Caches
from dflash_engine.models.draft import DraftModel
from dflash_engine.models.target import TargetModel
from dflash_engine.ops import (
    DRAFTED,
    AcceptRows,
    Choices,
    DraftBlocks,
    Feed,
    PlanRows,
    Tiling,
    accept,
    choose,
    run_choices,
    run_draft_feed,
    run_feed,
    tokens_per_tile,
)
from dflash_engine.random_weights import SimulatedAcceptance
from dflash_engine.round_layout import CHOICE_CHUNK, RoundLayout, Sections, Shape
from dflash_engine.slots import SlotTable


class DeviceRound:
    """Models, caches and the tensors between the pieces of a round."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        caches: Caches,
        slots: SlotTable,
        layout: RoundLayout,
        block_length: int,
        dtype: torch.dtype,
        device: torch.device,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._caches = caches
        self._slots = slots
        self._layout = layout
        self._simulated = simulated
        self.block_length = block_length
        self._device = device
        self._padding_cell = caches.num_blocks * caches.block_size
        self.plan = self._full(sum(layout.sizes), -1)
        self._sections: Sections[Tensor] = layout.sections(self.plan)
        rows, tokens = layout.rows, layout.tokens
        self._tokens = self._full(tokens, 0, torch.int64)
        self._positions = self._full(tokens, 0)
        self._cells = self._full(tokens, self._padding_cell, torch.int64)
        self._drafts = self._full(rows * max(block_length - 1, 1), 0).view(rows, -1)
        self.results = self._full(rows * (block_length + 1), 0)
        """int32: tokens given out [rows, block length], then their numbers [rows]."""
        self._taps = draft.config.target_layer_ids if draft else ()
        width = len(self._taps) * target.config.hidden_size
        self._features = torch.zeros((tokens, width), dtype=dtype, device=device)
        self._target_spans = self._spans(target.spans)
        self._draft_spans = self._spans(draft.spans) if draft else None

    def _full(self, size: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=self._device)

    def _spans(self, spans: frozenset[Span]) -> tuple[tuple[Span, ...], tuple[Tensor, Tensor]]:
        ordered = tuple(sorted(spans, key=str))
        windows = torch.tensor([window or 0 for window, _ in ordered], dtype=torch.int32)
        causal = torch.tensor([int(causal) for _, causal in ordered], dtype=torch.int32)
        return ordered, (windows.to(self._device), causal.to(self._device))

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def draft(self, num_rows: int, noise: bool) -> None:
        """Guesses of the blocks of the first `num_rows` drafting rows."""
        assert self._draft is not None and self._caches.draft is not None and self._draft_spans is not None
        sections, block = self._sections, self.block_length
        num_rows = min(num_rows, self._layout.rows)
        num = num_rows * block
        spans, bounds = self._draft_spans
        feed = self._new_feed(num, len(spans))
        tiles = torch.empty((num_rows, 2), dtype=torch.int32, device=self._device)
        slot = sections.draft_slot[:num_rows]
        blocks = DraftBlocks(slot, sections.draft_start[:num_rows], sections.draft_anchor[:num_rows])
        size = self._caches.block_size
        mask = self._draft.config.mask_token_id
        run_draft_feed(blocks, self._slots.state, feed, tiles, bounds, mask, block, size, self._padding_cell)
        config = self._draft.config
        tokens = tokens_per_tile(block, config.num_heads // config.num_kv_heads)
        if tokens < block:
            tiles = _cut(tiles, block, tokens)
        hidden = self._target.embed(feed.tokens)
        self._draft.forward(hidden, self._batch(feed, spans, Tiling(tiles, tokens, 0)), self._caches.draft)
        masked = hidden.view(num_rows, block, -1)[:, 1:].flatten(0, 1)
        heat = None
        if noise:
            sampling, places = self._slots.sampling, feed.positions.view(num_rows, block)[:, 1:]
            owners = slot.repeat_interleave(block - 1, output_size=num_rows * (block - 1))
            heat = (owners, places.flatten(), sampling.temperature, sampling.key)
        best = self._draft.best(masked, self._target.head, heat)
        self._drafts[:num_rows].copy_(best.view(num_rows, block - 1))

    def verify(self, shape: Shape) -> None:
        """Feeds the target, chooses, accepts, and leaves the outcome in `results`."""
        sections, num = self._sections, shape.tokens
        num_rows = min(num, self._layout.rows)
        rows = PlanRows(*(section[:num_rows] for section in sections[: len(PlanRows._fields)]))
        spans, (windows, _) = self._target_spans
        feed = self._new_feed(num, len(spans))._replace(
            tokens=self._tokens[:num], positions=self._positions[:num], cells=self._cells[:num]
        )
        codes, token_row = sections.codes[:num], sections.token_row[:num]
        size = self._caches.block_size
        run_feed(
            codes, token_row, rows, self._slots.state, self._drafts, feed, windows, size, self._padding_cell
        )
        tiles = sections.tiles[: 2 * shape.tiles].view(-1, 2)
        batch = self._batch(feed, spans, Tiling(tiles, shape.tile_tokens, shape.num_splits))
        taps = self._taps if shape.taps else ()
        features = self._features[:num] if shape.taps else self._features[:num, :0]
        hidden, _ = self._target.forward(feed.tokens, batch, self._caches.target, taps, features)
        chosen = self._choose(shape, rows, feed, hidden)
        state, block = self._slots.state, self.block_length
        out = self.results[: num_rows * block].view(num_rows, block)
        num_out = self.results[self._layout.rows * block :][:num_rows]
        accept(
            AcceptRows(*rows[:7]),
            chosen,
            feed.tokens if self._simulated is None else self._simulate(self._simulated, num, feed, chosen),
            state.length,
            state.anchor,
            self._slots.sampling,
            out,
            num_out,
        )

    def _simulate(self, simulated: SimulatedAcceptance, num: int, feed: Feed, chosen: Tensor) -> Tensor:
        """int64 [num]: what the choices are compared with in place of the tokens fed."""
        codes, row = self._sections.codes[:num], self._sections.token_row[:num]
        at = self._sections.first_choice[row] + DRAFTED - codes
        said = chosen[at.clamp(0, len(chosen) - 1)]
        return simulated.compared(feed.tokens, feed.sequence, feed.positions, codes <= DRAFTED, said)

    def context(self, num: int) -> None:
        """The draft's keys and values of the `num` tokens that the target was fed last.

        Those of rejected tokens are written too: nobody reads them before they are overwritten.
        """
        assert self._draft is not None and self._caches.draft is not None
        self._draft.write_context(
            self._features[:num], self._positions[:num], self._cells[:num], self._caches.draft
        )

    def _choose(self, shape: Shape, rows: PlanRows, feed: Feed, hidden: Tensor) -> Tensor:
        sections, num = self._sections, shape.choices
        choices = self._new_choices(num)
        rows_of, offsets = sections.choice_row[:num], sections.choice_offset[:num]
        run_choices(rows_of, offsets, rows, self._slots.state, choices)
        sampling = self._slots.sampling
        noise = (choices.slot, choices.position, sampling.temperature, sampling.key) if shape.noise else None
        best = self._target.best_of(hidden[choices.hidden], noise)
        if not shape.full:
            return best
        # The place behind the last takes what rows of padding choose.
        chosen = torch.cat([best, best.new_zeros(1)])
        for first in range(0, shape.full, CHOICE_CHUNK):
            which = sections.full[first : min(first + CHOICE_CHUNK, shape.full)]
            at = which.clamp(min=0).long()
            slot = torch.where(which >= 0, choices.slot[at], -1)
            logits = self._target.logits(hidden[choices.hidden[at]])
            before, fed = choices.num_before[at], choices.fed_index[at]
            picked = choose(logits, slot, choices.position[at], feed.tokens, fed, before, sampling)
            chosen.index_copy_(0, torch.where(which >= 0, at, num), picked)
        return chosen[:num]

    def _batch(self, feed: Feed, spans: tuple[Span, ...], tiling: Tiling) -> ForwardBatch:
        return ForwardBatch(
            positions=feed.positions,
            slots=feed.cells,
            row_seq=feed.sequence,
            tables=self._slots.state.tables,
            spans={span: (feed.begin[index], feed.end[index]) for index, span in enumerate(spans)},
            tiling=tiling,
        )

    def _new_feed(self, num: int, num_spans: int) -> Feed:
        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return Feed(
            tokens=empty(torch.int64, num),
            positions=empty(torch.int32, num),
            cells=empty(torch.int64, num),
            sequence=empty(torch.int32, num),
            begin=empty(torch.int32, num_spans, num),
            end=empty(torch.int32, num_spans, num),
        )

    def _new_choices(self, num: int) -> Choices:
        narrow = [torch.empty(num, dtype=torch.int32, device=self._device) for _ in range(4)]
        hidden = torch.empty(num, dtype=torch.int64, device=self._device)
        return Choices(narrow[0], narrow[1], hidden, narrow[2], narrow[3])


def _cut(tiles: Tensor, block: int, tokens: int) -> Tensor:
    """Tiles [R, 2] of a whole block each, or none, as tiles of at most `tokens` rows."""
    offset = torch.arange(0, block, tokens, dtype=torch.int32, device=tiles.device)
    first = tiles[:, :1] + offset
    size = (tiles[:, 1:] - offset).clamp(0, tokens)
    return torch.stack([first, size], dim=-1).view(-1, 2).contiguous()
