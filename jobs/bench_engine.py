"""Speed of plain decoding, DFlash and, if asked, transformers on the same prompts in one run.

The variants take turns at every group of prompts, so that a machine that slows down slows all of them.
Seconds run from the call to the last token, prompt included; the prefix cache is off.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_engine import ConfigError, DFlashEngine, EngineError, Result, SamplingParams

Messages = list[dict[str, str]]
Variant = Callable[[list[Messages]], list[Result]]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, default=Path("configs/batch/customer_service.jsonl"))
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8", help="prompts at a time (default: %(default)s)")
    parser.add_argument("--with_transformers", action="store_true", help="its generate() too, at batch 1")
    args = parser.parse_args(argv)
    try:
        args.batch = [int(size) for size in args.batch.split(",")]
        valid = min(args.batch) > 0
    except ValueError:
        valid = False
    if not valid:
        parser.error(f"--batch {args.batch}: give sizes like 1,8")
    if args.num_prompts < 1:
        parser.error(f"--num_prompts {args.num_prompts}: give at least 1")
    return args


def read_prompts(path: Path, limit: int) -> list[Messages]:
    """The first `limit` conversations of a JSONL file whose rows have `messages`. Raises `ConfigError`."""
    try:
        with path.open(encoding="utf-8") as lines:
            prompts = [json.loads(line)["messages"] for line in itertools.islice(lines, limit)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--prompts {path}: needs JSON rows with messages ({error!r})") from error
    if not prompts:
        raise ConfigError(f"--prompts {path}: the file is empty")
    return prompts


def measure(
    variants: Mapping[str, Variant], groups: Sequence[list[Messages]]
) -> dict[str, tuple[list[Result], float]]:
    """Answers and seconds of each variant; who goes first changes from group to group."""
    answers: dict[str, list[Result]] = {name: [] for name in variants}
    seconds = dict.fromkeys(variants, 0.0)
    names = list(variants)
    for turn, group in enumerate(groups):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            answers[name] += variants[name](group)
            seconds[name] += time.perf_counter() - started
    return {name: (answers[name], seconds[name]) for name in variants}


def figures(answers: Sequence[Result], elapsed_s: float, expected: Sequence[Result]) -> dict[str, Any]:
    """One line of the table; `expected` are plain decoding's answers to the same prompts."""
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    steps = sum(answer.usage.steps for answer in answers)
    accepted = sum(answer.usage.accepted_tokens for answer in answers)
    return {
        "completion_tokens": tokens,
        "elapsed_s": round(elapsed_s, 3),
        "tokens_per_s": round(tokens / elapsed_s, 2),
        "acceptance_length": round((accepted + steps) / steps, 3) if steps else None,
        "equal_answers": sum(a.tokens == b.tokens for a, b in zip(answers, expected, strict=True)),
    }


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
    }


def variants_of(args: argparse.Namespace) -> dict[str, Variant]:
    """What is measured, each loaded and warmed up by one short answer to be thrown away."""
    # Each of the three may hold the whole model on the same device.
    common = {
        "dtype": args.dtype,
        "device": args.device,
        "prefix_caching": False,
        "gpu_memory_utilization": 0.3,
    }
    sampling = SamplingParams(max_tokens=args.max_tokens)
    plain = DFlashEngine(args.model, None, max_num_seqs=max(args.batch), **common)
    dflash = DFlashEngine(args.model, args.draft, max_num_seqs=max(args.batch), **common)
    variants: dict[str, Variant] = {
        "plain": lambda group: plain.generate(group, sampling),
        "dflash": lambda group: dflash.generate(group, sampling),
    }
    if args.with_transformers:
        from dflash_engine.baseline import TransformersBaseline

        baseline = TransformersBaseline(args.model, dtype=args.dtype, device=args.device)
        variants["transformers"] = lambda group: [
            baseline.generate(turns, args.max_tokens) for turns in group
        ]
    return variants


def table(runs: Sequence[Mapping[str, Any]], num_prompts: int) -> str:
    head = "batch variant       tokens  seconds  tokens/s  x plain  accepted  equal"
    lines = [
        f"{run['batch']:>5} {run['variant']:<12} {run['completion_tokens']:>7} {run['elapsed_s']:>8.1f} "
        f"{run['tokens_per_s']:>9.1f} {run['times_plain']:>8.2f} {run['acceptance_length'] or 1:>9.2f}  "
        f"{run['equal_answers']}/{num_prompts}"
        for run in runs
    ]
    return "\n".join([head, *lines])


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        prompts = read_prompts(args.prompts, args.num_prompts)
        variants = variants_of(args)
        for run in variants.values():
            run(prompts[:1])
    except EngineError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 2
    runs: list[dict[str, Any]] = []
    expected: list[Result] = []
    for batch in args.batch:
        names = [name for name in variants if batch == 1 or name != "transformers"]
        groups = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
        measured = measure({name: variants[name] for name in names}, groups)
        expected = expected or measured["plain"][0]
        plain_speed = None
        for name in names:
            line = {"batch": batch, "variant": name, **figures(*measured[name], expected)}
            plain_speed = plain_speed or line["tokens_per_s"]
            runs.append({**line, "times_plain": round(line["tokens_per_s"] / plain_speed, 3)})
    ours = [run for run in runs if run["variant"] != "transformers"]
    identical = all(run["equal_answers"] == len(prompts) for run in ours)
    print(table(runs, len(prompts)))
    print("tokens/s with the prompts' time; equal: answers with the same tokens as the first line's")
    asked = {"model": args.model, "draft": args.draft, "dtype": args.dtype, "max_tokens": args.max_tokens}
    summary = {**asked, "prompts": len(prompts), "identical": identical, "runs": runs, "machine": machine()}
    print(json.dumps(summary))
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
