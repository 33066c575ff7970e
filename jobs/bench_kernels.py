"""Our GPU kernels in the shapes of a model: checked against the reference, then timed in a CUDA graph.

Each is shown beside plain torch for the same thing, and as a share of what the device reaches in this run:
bytes of an addition of one to a large vector, or operations of a large matrix product, whichever binds. A
kernel that fails its check is not timed, and the exit code is 1. Without a CUDA device the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_engine import EngineError
from dflash_engine.kernel_bench import measure
from dflash_engine.machine import machine


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="configs/models/qwen3-8b", help="a folder with config.json")
    parser.add_argument("--draft", default="auto", help="auto: the folder's own, if it has one; none")
    parser.add_argument("--rows", type=_counts, default=[1, 16, 64, 256, 2048], help="such as 1,16,256")
    parser.add_argument("--kernels", default="", help="only those whose names begin so, such as head,qkv")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: give at least 1")
    return args


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    head = "kernel                    rows  error      rows alone       us     GB/s  TFLOP/s  share  x torch"
    return "\n".join([head, *(_row(line) for line in lines)])


def _row(line: Mapping[str, Any]) -> str:
    alone = "yes" if line["rows_alone"] else "NO"
    start = f"{line['kernel']:<24} {line['rows']:>5}  {line['error']:<9.2e}  {alone:<10}"
    if not line["passed"]:
        return f"{start}  FAILED, not timed"
    torch_times = "-" if line["times_torch"] is None else f"{line['times_torch']:.2f}"
    return (
        f"{start} {line['seconds'] * 1e6:>8.1f} {line['bytes_per_s'] / 1e9:>8.0f} "
        f"{line['flops_per_s'] / 1e12:>8.1f} {line['share']:>6.2f} {torch_times:>8}"
    )


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    wanted = tuple(args.kernels.split(","))
    try:
        result = measure(args.model, args.draft, args.rows, wanted, args.repeats)
    except EngineError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 2
    reached = result["ceilings"]
    print(table(result["kernels"]))
    print(
        f"ceilings measured here: {reached['bytes_per_s'] / 1e12:.2f} TB/s read and written, "
        f"{reached['flops_per_s'] / 1e12:.0f} TFLOP/s in bf16"
    )
    passed = all(line["passed"] for line in result["kernels"])
    line = json.dumps({"model": args.model, "passed": passed, **result, "machine": machine()})
    if args.json is not None:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
