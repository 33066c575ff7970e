"""Train a DFlash draft for a target: `python jobs/train_draft.py --config configs/train/smollm2.yaml`.

The same command goes on where the last one ended. `torchrun --nproc-per-node N` uses N GPUs, `--ray N` as
many workers of a Ray cluster.

  --generate        answer the prompts of the config's `generate` section with the target: the training data
  --estimate        what a run costs: step times at the config's shapes with random weights, times its steps
  --stop_after_s    end in time, with the state saved: for machines that are lent for minutes
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_engine import EngineError
from dflash_engine.training.config import TrainConfig, load_train_config


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="dotted.key=value")
    parser.add_argument("--output", help="in place of the config's")
    parser.add_argument("--stop_after_s", type=float, help="seconds after which this start ends")
    parser.add_argument("--profile", action="store_true", help="time every kernel over some steps")
    parser.add_argument("--ray", type=int, metavar="WORKERS", help="train under Ray Train")
    parser.add_argument("--price_per_gpu_hour", type=float, help="for --estimate")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--generate", action="store_true")
    mode.add_argument("--estimate", action="store_true")
    return parser.parse_args(argv)


def stop_in_time(seconds: float | None) -> Callable[[], bool]:
    """True once the seconds have passed, or the process was asked to end."""
    end = None if seconds is None else time.monotonic() + seconds
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    return lambda: bool(asked) or (end is not None and time.monotonic() > end)


def show(line: dict[str, Any]) -> None:
    """One line of progress for people."""
    kind = line.get("event")
    if kind == "step":
        text = (
            f"step {line['step']}/{line['steps']}  loss {line['loss']:.3f}  acceptance "
            f"{line['acceptance_length']:.2f}  {line['step_ms']:.1f} ms (host {line['host_ms']:.1f}, "
            f"data {line['data_ms']:.1f})  "
            f"{line['tokens_per_s']:,.0f} tokens/s  {line['blocks_per_s']:,.0f} blocks/s  "
            f"{line['peak_gib']:.0f} GiB"
        )
    elif kind == "held_out":
        lengths = "  ".join(f"{name} {value:.2f}" for name, value in line["acceptance_length"].items())
        text = f"held out at step {line['step']}: {lengths}"
    elif kind == "profile":
        text = line["table"]
    else:
        text = json.dumps(line)
    print(text, file=sys.stderr, flush=True)


def work(args: argparse.Namespace, config: TrainConfig) -> dict[str, Any]:
    """What the mode asks for; its summary."""
    stop = stop_in_time(args.stop_after_s)
    if args.generate:
        from dflash_engine.training.generation import generate_shards

        return generate_shards(config.target, config.generate, stop, show)
    if args.estimate:
        from dflash_engine.training.estimate import estimate

        return estimate(config, args.price_per_gpu_hour, show)
    if args.ray:
        from pipelines.training import train_on_ray

        return train_on_ray(config, args.ray, args.stop_after_s)
    from dflash_engine.training.ranks import launched
    from dflash_engine.training.trainer import Options, train

    with launched(config.run.device):
        return train(config, Options(stop, show, args.profile))


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    changes = [*args.set, *([f"output={args.output}"] if args.output else [])]
    try:
        summary = work(args, load_train_config(args.config, changes))
    except EngineError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 2
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
