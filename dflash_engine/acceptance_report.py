"""How much of a draft the target accepts, data set by data set: by running the engine, and nothing timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_engine.accepted import Accepted
from dflash_engine.bench_prompts import chat_prompts
from dflash_engine.benchmarking import Prompt
from dflash_engine.config import EngineConfig
from dflash_engine.core import EngineCore
from dflash_engine.errors import ConfigError, RequestError
from dflash_engine.request import Request, SamplingParams


def acceptance_report(
    settings: Mapping[str, Any], datasets: Sequence[Path], num_prompts: int, max_tokens: int
) -> dict[str, dict[str, Any]]:
    """Figures of each data set, by the file's name; greedy, and every round drafts the whole block.

    settings are those of `EngineConfig`. Raises `ConfigError`, also where there is no draft.
    """
    values = {"verify": "block", "prefix_caching": False, **settings}
    core = EngineCore(EngineConfig(**values))
    if core.block_length < 2:
        raise ConfigError("acceptance is that of a draft: give one, and a block_length of 2 or more")
    return {
        path.stem: _figures(core, chat_prompts(core.config.model, [path], num_prompts), max_tokens)
        for path in datasets
    }


def _figures(core: EngineCore, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Any]:
    accepted, drafted_tokens, completion_tokens, refused = measured(core, prompts, max_tokens)
    return {
        "prompts": len(prompts) - refused,
        "completion_tokens": completion_tokens,
        "steps": accepted.steps,
        "drafted_tokens": drafted_tokens,
        "acceptance_length": accepted.length,
        "rates": accepted.rates,
        "histogram": accepted.histogram.tolist(),
    }


def measured(core: EngineCore, prompts: Sequence[Prompt], max_tokens: int) -> tuple[Accepted, int, int, int]:
    """Rounds of all answers, tokens drafted, tokens answered, and prompts that were refused."""
    total = Accepted(core.block_length)
    drafted_tokens = completion_tokens = refused = 0
    rounds: dict[int, list[int]] = {}
    for prompt in prompts:
        sampling = SamplingParams(max_tokens=max_tokens)
        try:
            rounds[core.add(core.prepare(Request(token_ids=prompt, sampling=sampling)))] = []
        except RequestError:
            refused += 1
    while core.has_work:
        for seq_id, chunk in core.step():
            rounds[seq_id].append(len(chunk.tokens))
            if chunk.result is not None:
                usage = chunk.result.usage
                drafted_tokens += usage.drafted_tokens
                completion_tokens += usage.completion_tokens
                _count(rounds.pop(seq_id), usage.accepted_tokens, max_tokens, total)
    return total, drafted_tokens, completion_tokens, refused


def _count(committed: Sequence[int], accepted_tokens: int, max_tokens: int, into: Accepted) -> None:
    """One answer by the tokens that each round committed; the first is prefill's."""
    given, left = committed[0], accepted_tokens
    for number, tokens in enumerate(committed[1:], 2):
        drafted = min(len(into.histogram), max_tokens - given) - 1
        # A stop inside the drafted tokens cuts the target's own off, so the last round has what is left.
        accepted = left if number == len(committed) else tokens - 1
        into.add(drafted, accepted)
        given, left = given + tokens, left - accepted


def acceptance_table(report: Mapping[str, Mapping[str, Any]]) -> str:
    """For people: a line for each data set."""
    lines = ["data set               prompts   steps  accepted  by position"]
    for name, each in report.items():
        rates = " ".join(f"{rate:.2f}" for rate in each["rates"])
        lines.append(
            f"{name:<22} {each['prompts']:>7} {each['steps']:>7} {each['acceptance_length']:>9.3f}  {rates}"
        )
    return "\n".join(lines)
