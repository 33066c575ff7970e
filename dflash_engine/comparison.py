"""Runs contenders against each other, in turn or one after the other, and says how they did."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_engine.benchmarking import (
    Contender,
    Prompt,
    Run,
    StallPlan,
    Variant,
    figures,
    run,
    stall,
)
from dflash_engine.contenders import BenchSettings, on_gpu
from dflash_engine.memory import MemoryReport, memory_report

LEAST_PROMPTS = 16
"""At any concurrency, where there are so many."""
WARM_TOKENS = 64
"""Of each answer of a short warm-up."""
WHOLE_WARM_UPS = 2
"""Where everything is answered before it counts: a graph is captured when its shape is met again."""
STREAMS = 8
STREAM_PROMPT = 128
STALL_PIECES = 64
STALL_ROOM = 2048
"""Tokens that a stream may answer, behind as many as the long prompt has."""
SLACK_BYTES = 6 << 30
"""For what an engine takes beside weights and KV: activations, graphs, its libraries."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What each contender is given."""

    prompts: Sequence[Prompt]
    max_tokens: int
    concurrency: tuple[int, ...]
    turns: int = 4
    """Prompts at each concurrency, as a multiple of it."""
    repeats: int = 1
    """Measured runs, of which the one in the middle counts."""
    whole_warm_up: bool = False
    """Answers everything before it counts, so that every kernel is compiled and every graph captured."""

    def at(self, concurrency: int) -> Sequence[Prompt]:
        return self.prompts[: max(self.turns * concurrency, LEAST_PROMPTS)]


@dataclass(frozen=True, slots=True)
class Comparison:
    lines: tuple[dict[str, Any], ...]
    """One for each concurrency and variant: `figures`, with what they are of and how many answers agree."""
    memory: Mapping[str, dict[str, int]]
    """By variant, where it is known."""
    identical: bool
    """Whether all answers of exact variants are those of plain decoding."""


def compare(
    variants: Sequence[Variant], workload: Workload, utilization: float, *, together: bool
) -> Comparison:
    """`together`: those that can are built first and take turns at every concurrency; the others come one
    after the other, each by itself."""
    runs: dict[tuple[int, str], list[Run]] = defaultdict(list)
    memory: dict[str, dict[str, int]] = {}
    for group in _groups(variants, together=together):
        contenders = _built(group, utilization)
        for variant in group:
            report = contenders[variant.name].memory
            if report is not None:
                memory[variant.name] = asdict(report) | {"kv_tokens_lost": report.kv_tokens_lost}
        for turn, concurrency in enumerate(workload.concurrency):
            able = [each for each in group if concurrency <= (each.most_at_once or concurrency)]
            for name, measured in _level(able, contenders, workload, concurrency, turn):
                runs[concurrency, name].append(measured)
        for contender in contenders.values():
            contender.close()
    return _told(variants, workload, runs, memory)


def _groups(variants: Sequence[Variant], *, together: bool) -> list[list[Variant]]:
    """Those that are built at the same time."""
    shared = [variant for variant in variants if together and not variant.alone]
    alone = [[variant] for variant in variants if variant not in shared]
    return [shared, *alone] if shared else alone


def _built(group: Sequence[Variant], utilization: float) -> dict[str, Contender]:
    own = utilization / len(group)
    return {each.name: each.make(min(own * (at + 1), utilization)) for at, each in enumerate(group)}


def _level(
    group: Sequence[Variant],
    contenders: Mapping[str, Contender],
    workload: Workload,
    concurrency: int,
    turn: int,
) -> list[tuple[str, Run]]:
    """Measured runs at one concurrency; who goes first changes from turn to turn."""
    prompts = workload.at(concurrency)
    names = [variant.name for variant in group]
    warm, length, times = prompts, workload.max_tokens, WHOLE_WARM_UPS
    if not workload.whole_warm_up:
        warm, length, times = prompts[:concurrency], min(WARM_TOKENS, workload.max_tokens), 1
    for name in names * times:
        run(contenders[name], warm, length, concurrency)
    measured = []
    for repeat in range(workload.repeats):
        first = (turn + repeat) % len(names) if names else 0
        for name in names[first:] + names[:first]:
            measured.append((name, run(contenders[name], prompts, workload.max_tokens, concurrency)))
    return measured


def _told(
    variants: Sequence[Variant],
    workload: Workload,
    runs: Mapping[tuple[int, str], list[Run]],
    memory: Mapping[str, dict[str, int]],
) -> Comparison:
    expected: dict[int, tuple[int, ...]] = {}
    for concurrency in sorted(set(workload.concurrency)):
        for index, answer in enumerate(runs[concurrency, "plain"][0].answers):
            expected.setdefault(index, answer.tokens)
    lines = []
    identical = True
    for concurrency in workload.concurrency:
        plain_speed = 0.0
        for variant in variants:
            measured = runs.get((concurrency, variant.name))
            if not measured:
                continue
            middle = sorted(measured, key=lambda each: each.elapsed_s)[len(measured) // 2]
            equal = min(
                sum(answer.tokens == expected[index] for index, answer in enumerate(each.answers))
                for each in measured
            )
            identical &= not variant.exact or equal == len(middle.answers)
            line: dict[str, Any] = {"concurrency": concurrency, "variant": variant.name}
            line |= {"prompts": len(middle.answers), **figures(middle)}
            plain_speed = plain_speed or line["tokens_per_s"]
            line |= {"times_plain": line["tokens_per_s"] / plain_speed, "equal_answers": equal}
            lines.append(
                {key: round(value, 6) if isinstance(value, float) else value for key, value in line.items()}
            )
    return Comparison(tuple(lines), dict(memory), identical)


def fit_together(settings: BenchSettings, num_variants: int, workload: Workload) -> bool:
    """Whether so many copies of model and KV pool have room on the device at once."""
    if not on_gpu(settings.device):
        return True
    model, draft = settings.shapes()
    report: MemoryReport = memory_report(model, draft, getattr(torch, settings.dtype), 0)
    longest = max(map(len, workload.prompts)) + workload.max_tokens
    pool = max(workload.concurrency) * longest * (report.target_kv_bytes + report.draft_kv_bytes)
    each = report.target_bytes + report.draft_bytes + pool + SLACK_BYTES
    _, total = torch.cuda.mem_get_info()
    return num_variants * each <= total * settings.gpu_memory_utilization


def stalls(
    variants: Sequence[Variant], prompts: Sequence[Prompt], long: Prompt, utilization: float
) -> dict[str, Any]:
    """What a long prompt does to streams, by variant: see `stall`. Each is built alone and warmed up."""
    told = {}
    wanted = StallPlan(STALL_PIECES, STALL_ROOM)
    for variant in variants:
        contender = variant.make(utilization)
        for _ in range(WHOLE_WARM_UPS + 1):
            result = stall(contender, prompts, long, wanted)
        told[variant.name] = {key: round(value, 6) for key, value in result.items()}
        contender.close()
    return told


def median_ratio(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """DFlash's value over plain decoding's, the median over the concurrencies."""
    values = {(line["concurrency"], line["variant"]): line[key] for line in lines}
    ratios = [
        values[at, "dflash"] / value
        for (at, name), value in values.items()
        if name == "plain" and (at, "dflash") in values
    ]
    return statistics.median(ratios) if ratios else None
