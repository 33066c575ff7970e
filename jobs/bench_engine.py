"""Speed of plain decoding, DFlash and, if asked, others on the same prompts in one run.

At each concurrency so many requests are in flight all the time. Seconds run from the first submission to the
last token, prompts included; the prefix cache is off. Answers are compared with those of plain decoding at
the lowest concurrency; the exit code is 1 where an exact variant of ours differs.

  --weights random  shapes of a model without its checkpoint, such as configs/models/qwen3-8b
  --acceptance N    with random weights on a GPU: drafts count as right by chance, N tokens a whole block
  --ttft            what a draft costs the first token: prompts of 512 tokens, one at a time
  --acceptance-only what the target accepts of the draft on each --dataset, and at which position; nothing
                    is timed
  --stall           what 8 streams feel of a prompt of 6,000 tokens that arrives among them
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_engine import EngineError
from dflash_engine.acceptance_report import acceptance_report, acceptance_table
from dflash_engine.bench_prompts import chat_prompts, random_prompts
from dflash_engine.comparison import (
    STALL_ROOM,
    STREAM_PROMPT,
    STREAMS,
    Workload,
    compare,
    fit_together,
    median_ratio,
    stalls,
)
from dflash_engine.contenders import OTHERS, BenchSettings, on_gpu, variants_of
from dflash_engine.machine import machine

ROOM_BEHIND = 64
"""Tokens behind the longest answer: where no whole block has room, nothing is drafted."""
SIMULATED = (
    "SIMULATED ACCEPTANCE {:g}: weights are random, and which drafted tokens are right was made up. Speeds "
    "are those that a draft this good would give; the answers mean nothing."
)
TTFT = {"prompt_tokens": 512, "max_tokens": 16, "concurrency": [1]}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--weights", default="checkpoint", choices=["checkpoint", "random"])
    parser.add_argument("--acceptance", type=float, help="simulated; only with --weights random")
    parser.add_argument("--dataset", type=Path, nargs="+", help="JSONL with messages")
    parser.add_argument("--prompt_tokens", type=int, help="random prompts of this length, no data set")
    parser.add_argument("--num_prompts", type=int, default=64)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=_counts, default=[1, 8], help="such as 1,8,32 (default: 1,8)")
    parser.add_argument(
        "--turns", type=int, default=4, help="prompts at each concurrency, times it, 16 at least"
    )
    parser.add_argument("--repeats", type=int, default=1, help="measured runs; the middle one counts")
    parser.add_argument("--with", type=_names, default=[], dest="others", help=f"any of {','.join(OTHERS)}")
    parser.add_argument(
        "--gpu_memory_utilization", type=float, default=0.9, help="of all that is built at once"
    )
    parser.add_argument("--apart", action="store_true", help="one after the other, also where all would fit")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of our engine's settings")
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--ttft", action="store_true")
    mode.add_argument("--stall", action="store_true")
    mode.add_argument("--acceptance-only", "--acceptance_only", action="store_true")
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_tokens", "turns", "repeats", "prompt_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give at least 1")
    if args.acceptance is not None and args.weights != "random":
        parser.error("--acceptance makes up which drafts are right, so it needs --weights random")
    if args.dataset and (args.prompt_tokens or args.weights == "random" or args.ttft or args.stall):
        parser.error("--dataset does not go with random prompts, which this asks for")
    try:
        args.engine = {key: _value(text) for key, text in (pair.split("=", 1) for pair in args.set)}
    except ValueError:
        parser.error(f"--set {' '.join(args.set)}: give KEY=VALUE")
    if args.ttft:
        for name, value in TTFT.items():
            if getattr(args, name) == parser.get_default(name):
                setattr(args, name, value)
    return args


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(OTHERS):
        raise ValueError(text)
    return names


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def settings_of(args: argparse.Namespace, longest: int, max_num_seqs: int) -> BenchSettings:
    """With room for `longest` tokens, prompt and answer, or as many as the model takes."""
    values = {
        "model": args.model,
        "draft": None if args.draft == "none" else args.draft,
        "dtype": args.dtype,
        "device": args.device,
        "weights": args.weights,
        "acceptance": args.acceptance,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "ignore_eos": args.prompt_tokens is not None or args.weights == "random" or args.stall,
        "others": tuple(args.others),
        "engine": args.engine,
    }
    model, _ = BenchSettings(**values).shapes()
    max_model_len = min(longest + ROOM_BEHIND, model.max_position_embeddings)
    return BenchSettings(**values, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def measure(args: argparse.Namespace) -> tuple[str, dict[str, Any], int]:
    """The table, what goes into the JSON line, and the exit code."""
    if args.prompt_tokens or args.weights == "random":
        model, _ = settings_of(args, 2, 1).shapes()
        prompts = random_prompts(args.num_prompts, args.prompt_tokens or 128, model.vocab_size)
    else:
        files = args.dataset or [Path("configs/batch/customer_service.jsonl")]
        prompts = chat_prompts(args.model, files, args.num_prompts)
    workload = Workload(
        prompts, args.max_tokens, tuple(args.concurrency), args.turns, args.repeats, on_gpu(args.device)
    )
    settings = settings_of(args, max(map(len, prompts)) + args.max_tokens, max(args.concurrency))
    variants = variants_of(settings)
    num_shared = sum(not variant.alone for variant in variants)
    together = not args.apart and fit_together(settings, num_shared, workload)
    result = compare(variants, workload, args.gpu_memory_utilization, together=together)
    summary = {
        "together": together,
        "memory": result.memory,
        "identical": result.identical if args.acceptance is None else None,
        "runs": result.lines,
    }
    if args.ttft:
        summary["ttft_times_plain"] = median_ratio(result.lines, "ttft_s")
    notes = ["built together, taking turns" if together else "one after the other, each alone on the device"]
    notes += memory_table(result.memory)
    return "\n".join([table(result.lines), *notes]), summary, 0 if result.identical else 1


def measure_acceptance(args: argparse.Namespace) -> tuple[str, dict[str, Any], int]:
    """Of each data set by itself."""
    settings = {
        "model": args.model,
        "draft": None if args.draft == "none" else args.draft,
        "dtype": args.dtype,
        "device": args.device,
        "max_num_seqs": max(args.concurrency),
        "gpu_memory_utilization": args.gpu_memory_utilization,
        **args.engine,
    }
    files = args.dataset or [Path("configs/batch/customer_service.jsonl")]
    report = acceptance_report(settings, files, args.num_prompts, args.max_tokens)
    return acceptance_table(report), {"datasets": report}, 0


def measure_stall(args: argparse.Namespace) -> tuple[str, dict[str, Any], int]:
    long = args.prompt_tokens or 6000
    model, _ = settings_of(args, 2, 1).shapes()
    streams = random_prompts(STREAMS, min(STREAM_PROMPT, long), model.vocab_size)
    settings = settings_of(args, long + STALL_ROOM, STREAMS + 1)
    prompt = random_prompts(1, long, model.vocab_size, seed=1)[0]
    told = stalls(variants_of(settings), streams, prompt, args.gpu_memory_utilization)
    lines = ["variant        usual gap ms  longest gap ms  times  long prompt's first token ms"]
    for name, each in told.items():
        lines.append(
            f"{name:<14} {1e3 * each['usual_gap_s']:>12.2f} {1e3 * each['longest_gap_s']:>15.2f} "
            f"{each['times_usual']:>6.2f} {1e3 * each['long_prompt_ttft_s']:>28.1f}"
        )
    return "\n".join(lines), {"streams": STREAMS, "long_prompt_tokens": long, "stall": told}, 0


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "at once variant        prompts  tokens  tokens/s  x plain  TTFT ms  p95 ms  ms/token  accepted"
        "  drafted  equal"
    )
    lines = [
        f"{run['concurrency']:>7} {run['variant']:<14} {run['prompts']:>7} {run['completion_tokens']:>7} "
        f"{run['tokens_per_s']:>9.1f} {run['times_plain']:>8.2f} {1e3 * run['ttft_s']:>8.1f} "
        f"{1e3 * run['ttft_p95_s']:>7.1f} {1e3 * (run['time_per_token_s'] or 0):>9.3f} "
        f"{run['acceptance_length'] or 1:>9.2f} {run['drafted_per_step'] or 0:>8.2f}  "
        f"{run['equal_answers']}/{run['prompts']}"
        for run in runs
    ]
    return "\n".join([head, *lines])


def memory_table(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    if not memory:
        return []
    head = "variant        weights GB  draft GB  bytes/KV token  draft's  KV tokens  lost to the draft"
    lines = [
        f"{name:<14} {each['target_bytes'] / 1e9:>10.2f} {each['draft_bytes'] / 1e9:>9.2f} "
        f"{each['target_kv_bytes']:>15,} {each['draft_kv_bytes']:>8,} {each['kv_tokens']:>10,} "
        f"{each['kv_tokens_lost']:>18,}"
        for name, each in memory.items()
    ]
    return [head, *lines]


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        work = measure_stall if args.stall else measure_acceptance if args.acceptance_only else measure
        printed, summary, status = work(args)
    except EngineError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 2
    print(printed)
    names = ("model", "draft", "dtype", "weights", "max_tokens", "prompt_tokens", "gpu_memory_utilization")
    asked = {name: getattr(args, name) for name in names} | {"engine": args.engine}
    if args.acceptance is not None:
        print(SIMULATED.format(args.acceptance))
    line = json.dumps(asked | {"simulated_acceptance": args.acceptance} | summary | {"machine": machine()})
    if args.json is not None:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
