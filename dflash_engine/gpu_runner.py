"""Executes plans on a GPU, one round ahead of the host: pack, launch, collect a round later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_engine.device_round import DeviceRound
from dflash_engine.devices import use_device
from dflash_engine.graphs import Graphs
from dflash_engine.plan import RowOutput, StepOutput, StepPlan
from dflash_engine.round_layout import Packed, RoundLayout, longest_of, pack
from dflash_engine.round_timer import RoundTimer, RoundTimes
from dflash_engine.shard import Followers
from dflash_engine.slots import SlotChanges, SlotTable

_BUFFERS = 3
"""Rounds whose plan or result may still be on its way: two in flight, and the one being packed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A round in flight."""

    plan: StepPlan
    buffer: int
    packed: Packed


class Round(NamedTuple):
    """What another rank has to know of a round to queue it on its own device."""

    changes: SlotChanges | None
    plan: np.ndarray | None
    """int32, as `RoundLayout` has it; None where the device has it already."""
    packed: Packed


@dataclass(frozen=True, slots=True)
class RoundOutput(StepOutput):
    """What came of a round, with what its pieces took, for the policy that plans the next ones."""

    packed: Packed | None = None
    times: RoundTimes | None = None


class GpuRunner:
    """Launches rounds without waiting for them. `on_host` executes those in which the host takes part."""

    rounds_ahead = 1

    def __init__(
        self,
        device_round: DeviceRound,
        slots: SlotTable,
        layout: RoundLayout,
        graphs: Graphs,
        on_host: Callable[[StepPlan], StepOutput],
        heads: tuple[int, int],
        device: torch.device,
        followers: Followers | None = None,
    ) -> None:
        """heads: query heads and KV heads of the target, of one rank; followers: the other ranks, if any."""
        self._round = device_round
        self._slots = slots
        self._layout = layout
        self._graphs = graphs
        self._on_host = on_host
        self._followers = followers
        self._tiling = (heads[0] // heads[1], heads[1], device_round.block_length)
        self._device = device
        self._timer = RoundTimer(device, _BUFFERS)
        on_gpu = device.type == "cuda"
        size = sum(layout.sizes)
        self._plans = [torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_BUFFERS)]
        self._results = [
            torch.zeros(device_round.results.numel(), dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(_BUFFERS)
        ]
        self._num_launched = 0
        self._steady: tuple[object, Packed] | None = None

    def execute(self, plan: StepPlan) -> StepOutput:
        """A round with the host in it; none may be in flight."""
        use_device(self._device)
        if self._followers is not None:
            self._followers.tell(plan)
        with torch.inference_mode():
            output = self._on_host(plan)
        if self._followers is not None:
            self._followers.check()
        return output

    def launch(self, plan: StepPlan) -> Ticket:
        """Queues a round on the device."""
        use_device(self._device)
        buffer = self._num_launched % _BUFFERS
        self._num_launched += 1
        with torch.inference_mode():
            changes = self._slots.follow(plan.rows)
            packed, is_new = self._pack(plan, self._plans[buffer])
            if self._followers is not None:
                array = self._plans[buffer].numpy() if is_new else None
                self._followers.tell(Round(changes, array, packed))
            self._queue(buffer, packed, is_new)
        return Ticket(plan, buffer, packed)

    def follow(self, told: Round) -> None:
        """Queues a round of rank 0's on this rank's device.

        Its buffer is free: rank 0 is at most a round ahead of what its device has done, and no device is
        ahead of another by more than the part of a sum that it waits for.
        """
        buffer = self._num_launched % _BUFFERS
        self._num_launched += 1
        with torch.inference_mode():
            if told.changes is not None:
                self._slots.apply(told.changes)
            if told.plan is not None:
                self._plans[buffer].numpy()[:] = told.plan
            self._queue(buffer, told.packed, told.plan is not None)

    def _queue(self, buffer: int, packed: Packed, is_new: bool) -> None:
        """The device's part of a round; its plan is sent first where that is new."""
        self._timer.start(buffer)
        if is_new:
            self._round.plan.copy_(self._plans[buffer], non_blocking=True)
        if packed.drafting:
            num, noise = packed.drafting, packed.draft_noise
            self._graphs.run(("draft", num, noise), lambda: self._round.draft(num, noise))
        self._timer.drafted(buffer)
        shape = packed.shape
        self._graphs.run(("verify", shape), lambda: self._round.verify(shape))
        self._results[buffer].copy_(self._round.results, non_blocking=True)
        self._timer.verified(buffer)
        if shape.taps:
            self._graphs.run(("context", shape.tokens), lambda: self._round.context(shape.tokens))
        self._timer.done(buffer)

    def _pack(self, plan: StepPlan, staged: Tensor) -> tuple[Packed, bool]:
        """The plan's packed form, and whether it has to go to the device.

        Most plans say the same as the last one while nothing comes or goes: only how far the sequences are
        differs then, and that the device knows.
        """
        steady = _steady(plan)
        if steady is not None:
            steady = (self._slots.num_placed, steady)
            if self._steady is not None and steady == self._steady[0]:
                return self._steady[1].at(longest_of(plan), self._tiling[1]), False
        packed = pack(
            plan, self._layout, self._layout.sections(staged.numpy()), self._slots.kinds, *self._tiling
        )
        if not self._round.has_draft:
            packed = packed._replace(shape=packed.shape._replace(taps=False))
        self._steady = (steady, packed) if steady is not None else None
        return packed, True

    def collect(self, ticket: Ticket) -> RoundOutput:
        """Waits until the round's tokens are there."""
        times = self._timer.wait(ticket.buffer)
        if self._followers is not None:
            self._followers.check()
        results = self._results[ticket.buffer].numpy()
        rows = ticket.plan.rows
        width = self._round.block_length
        given = results[: len(rows) * width].reshape(-1, width).tolist()
        counts = results[self._layout.rows * width :][: len(rows)].tolist()
        outputs = tuple(
            [
                RowOutput(row.seq_id, tuple(tokens[:count]), row.num_draft)
                for row, tokens, count in zip(rows, given, counts, strict=True)
            ]
        )
        return RoundOutput(outputs, times.busy_ns, ticket.packed, times)


def _steady(plan: StepPlan) -> tuple[object, ...] | None:
    """What decides the packed form of a plan in which every row goes on where the last round leaves it."""
    rows = plan.rows
    if not all(row.ahead and row.sample for row in rows):
        return None
    return plan.write_context, *[(row.slot, row.num_draft) for row in rows]
