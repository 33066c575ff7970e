"""Measures at start-up what the pieces of a round take, by size; kernels are compiled on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from dflash_engine.gpu_runner import GpuRunner
from dflash_engine.plan import RowPlan, StepPlan
from dflash_engine.request import SamplingParams
from dflash_engine.round_layout import SIZES
from dflash_engine.round_timer import RoundTimes
from dflash_engine.step_times import StepTimes

SHORT, LONG = 32, 256
"""Positions of the rows: keys of the first ones are never divided, and times are measured at the second."""
LONG_PROMPT, CHUNK = 4096, 256
"""Where a prompt is measured again, and by how many tokens: there its keys are what takes the time."""
LEAST_SPAN = 256.0
CHUNKS = (2, 4, 8, 16, 32, 64, 128)
"""Tokens of a prompt in one round, for each size of its attention tiles."""
REPEATS = 4
HOST_S = 0.2e-3
HOST_ROW_S = 6e-6
"""What the host needs at least for a round, and for a row of it: 3.5 ms for 512 rows were seen on an H200's
host, and 0.85 for one."""
WAYS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
)
"""One for each way to choose that has kernels of its own; times are those of the first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a step and of a sequence."""

    max_num_seqs: int
    max_step_tokens: int
    max_model_len: int


class Calibration:
    """Runs rounds of known sizes; nothing else may be running.

    Their sequences are `num_blocks` times the pool's first block, so nothing of value is overwritten.
    """

    def __init__(self, runner: GpuRunner, limits: Limits, num_blocks: int, num_draft: int) -> None:
        self._runner = runner
        self._max_num_seqs = limits.max_num_seqs
        self._max_model_len = limits.max_model_len
        # Larger steps there are none: all sequences would be fed whole.
        self._max_step_tokens = min(limits.max_step_tokens, limits.max_num_seqs * limits.max_model_len)
        self._max_drafting = min(limits.max_num_seqs, limits.max_step_tokens // 2)
        self._num_draft = num_draft
        # The same lists in each round: only new ones are written to the device.
        self._tables = [[0] * num_blocks for _ in WAYS]
        most = max(limits.max_model_len - limits.max_step_tokens, 0)
        self._starts = (min(SHORT, most), min(LONG, most))

    def measure(self) -> StepTimes:
        """Seconds of each piece by size."""
        verify: dict[int, float] = {}
        context: dict[int, float] = {}
        for size in _sizes(self._max_step_tokens):
            measured = [self._run(self._spread(size), self._starts[1]) for _ in range(REPEATS)]
            verify[size] = min(each.verify_ns for each in measured) / 1e9
            context[size] = max(min(each.context_before_ns for each in measured[1:]), 1) / 1e9
        draft: dict[int, float] = {}
        for num_rows in _sizes(self._max_drafting):
            if self._num_draft:
                rows = [(1, 1)] * num_rows
                draft[num_rows] = min(self._run(rows, self._starts[1]).draft_ns for _ in range(REPEATS)) / 1e9
        return StepTimes(verify, draft or {1: 1.0}, context, HOST_S, HOST_ROW_S)

    def attention_span(self) -> float:
        """Positions behind which a prompt's token takes twice as long as a first one, for all the keys before
        it; infinite where that cannot be seen."""
        num = min(CHUNK, self._max_step_tokens)
        start = min(LONG_PROMPT, self._max_model_len - num)
        if start < CHUNK:
            return math.inf
        short_s, long_s, one_s = (
            min(self._run([(tokens, 0)], at).verify_ns for _ in range(REPEATS))
            for tokens, at in ((num, 0), (num, start), (1, 0))
        )
        if long_s <= short_s:
            return math.inf
        return max(start * max(short_s - one_s, 0) / (long_s - short_s), LEAST_SPAN)

    def warm_up(self) -> None:
        """Compiles what sampling needs, and captures what decoding is made of, at its second run."""
        for _ in range(2):
            self._warm_once()

    def _warm_once(self) -> None:
        for num in (1, 32, 64, 128):
            if num <= self._max_drafting:
                drafted = min(self._num_draft, 1)
                for way in range(1, len(WAYS)):
                    self._run([(1, drafted)] * num, self._starts[0], way)
        for size in _sizes(self._max_step_tokens):
            for start in self._starts:
                self._run(self._spread(size), start)
                num_rows = size // (1 + self._num_draft)
                if self._num_draft and 1 <= num_rows <= self._max_num_seqs:
                    self._run([(1, self._num_draft)] * num_rows, start)
        # Attention has kernels for chunks of few tokens and of many.
        for num in takewhile(lambda num: num <= min(self._max_step_tokens, self._max_model_len), CHUNKS):
            for start in self._starts:
                self._run([(num, 0)], min(start, self._max_model_len - num))

    def _spread(self, size: int) -> list[tuple[int, int]]:
        """`size` tokens over as many rows as may be."""
        num = min(size, self._max_num_seqs)
        return [(size // num + (row < size % num), 0) for row in range(num)]

    def _run(self, counts: list[tuple[int, int]], start: int, way: int = 0) -> RoundTimes:
        """One round of rows of (known tokens, drafted tokens) from `start` on."""
        params, blocks = WAYS[way], self._tables[way]
        rows = [
            RowPlan(-1, start, (0,) * known, drafted, True, blocks, params, 0, (), (), slot)
            for slot, (known, drafted) in enumerate(counts)
        ]
        plan = StepPlan(tuple(rows), write_context=self._num_draft > 0)
        times = self._runner.collect(self._runner.launch(plan)).times
        assert times is not None
        return times


def _sizes(most: int) -> list[int]:
    """Sizes up to `most`, itself among them; none for 0."""
    return [*(size for size in SIZES if size < most), *([most] if most else [])]
