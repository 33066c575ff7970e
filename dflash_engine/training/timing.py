"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dflash_engine.training.config import TrainConfig
from dflash_engine.training.plans import StepPlan
from dflash_engine.training.step import WARM_STEPS, TrainStep

PROFILED_STEPS = 5
KERNELS = 30


class StepClock:
    """Reads what steps have added up, and how long they took; waits for the device when it is read."""

    def __init__(self, config: TrainConfig, step: TrainStep) -> None:
        self._config, self._step = config, step
        self._since = self._paused = self._data = 0.0
        self._read_at, self._read_step, self._read_paused = 0.0, 0, 0.0

    def start(self, step: int) -> None:
        self.synchronize()
        self._since = self._read_at = time.perf_counter()
        self._paused = self._read_paused = self._data = 0.0
        self._read_step = step

    @property
    def seconds(self) -> float:
        """Since the start, without pauses."""
        return time.perf_counter() - self._since - self._paused

    def waited(self, plans: Iterable[StepPlan], fetch: Callable[[StepPlan], None]) -> Iterator[StepPlan]:
        """The plans with their features fetched, and the host's time for both counted."""
        waiting = iter(plans)
        while True:
            begun = time.perf_counter()
            plan = next(waiting, None)
            if plan is None:
                return
            fetch(plan)
            self._data += time.perf_counter() - begun
            yield plan

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.synchronize()
        begun = time.perf_counter()
        yield
        self.synchronize()
        self._paused += time.perf_counter() - begun

    def read(self, done: int) -> dict[str, Any]:
        """What came of the steps since the last reading. `host_ms` is what the host took to launch a step and
        `data_ms` its part for plan and features: near `step_ms`, they are what limits."""
        launched = time.perf_counter()
        tally = self._step.tally.tolist()
        self._step.tally.zero_()
        self.synchronize()
        now = time.perf_counter()
        steps = max(done - self._read_step, 1)
        begun = self._read_at + self._paused - self._read_paused
        each, host, data = ((end - begun) / steps for end in (now, launched, begun + self._data))
        self._data = 0.0
        self._read_at, self._read_step, self._read_paused = now, done, self._paused
        batch, row_tokens = self._config.batch, self._config.data.row_tokens
        places = self._step.config.block_size - 1
        rates = [hit / max(of, 1) for hit, of in zip(tally[2 : 2 + places], tally[2 + places :], strict=True)]
        return {
            "step": done,
            "loss": tally[0] / max(tally[1], 1e-9),
            "acceptance_length": 1 + sum(rates),
            "gradient_norm": float(self._step.norm),
            "step_ms": 1e3 * each,
            "host_ms": 1e3 * host,
            "data_ms": 1e3 * data,
            "tokens_per_s": batch.rows * row_tokens / each,
            "blocks_per_s": batch.rows * batch.anchors / each,
            "peak_gib": self._peak_gib(),
        }

    def _peak_gib(self) -> float:
        """Most that tensors took of the device's memory so far."""
        device = self._step.features.device
        return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0

    def synchronize(self) -> None:
        if self._step.features.is_cuda:
            torch.cuda.synchronize(self._step.features.device)


def profiled(
    plans: Iterable[StepPlan], wanted: bool, report: Callable[[dict[str, Any]], None]
) -> Iterator[StepPlan]:
    """The plans; where wanted, the steps made with some of them are reported kernel by kernel."""
    if not wanted:
        yield from plans
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    first = WARM_STEPS + 2
    profiler = torch.profiler.profile(activities=activities)
    for number, plan in enumerate(plans):
        if number == first:
            profiler.start()
        if number == first + PROFILED_STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.stop()
            by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            report(
                {"event": "profile", "table": profiler.key_averages().table(sort_by=by, row_limit=KERNELS)}
            )
        yield plan
