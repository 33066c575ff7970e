"""Rows a second of a whole job without a model, beside plain Ray Data doing the same in the same run.

    python -m tests.pipelines.bench_pipeline [rows]

Both read JSONL of chats and write Parquet to the local disk on a cluster of two cores; the engine answers at
once, and in Ray Data an actor hands its batches on. Prints rows/s of both, and the driver's memory.
"""

from __future__ import annotations

import io
import logging
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext

from dflash_engine.fake import WORDS
from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from tests.pipelines.helpers import jsonl

RUNS = 3


class Identity:
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


def chats(count: int) -> list[dict[str, Any]]:
    generator = random.Random(0)
    texts = (" ".join(generator.choices(WORDS, k=48)) for _ in range(count))
    return [
        {"custom_id": f"c{number}", "messages": [{"role": "user", "content": text}]}
        for number, text in enumerate(texts)
    ]


def plain_ray_data(source: Path, output: Path) -> None:
    rows = ray.data.read_json(str(source))
    rows.map_batches(Identity, compute=ActorPoolStrategy(size=1), num_cpus=1).write_parquet(str(output))


def pipeline(source: Path, output: Path) -> None:
    config = BatchConfig(
        input=str(source),
        output=str(output),
        engine={"model": "fake", "max_num_seqs": 256},
        sampling={"max_tokens": 8},
        shard={"rows": 4096},
    )
    run_batch(config, io.StringIO())


def main(count: int) -> None:
    folder = Path(tempfile.mkdtemp())
    source = folder / "in.jsonl"
    source.write_bytes(jsonl(chats(count)))
    print(f"{count:,} rows, {source.stat().st_size / 1e6:.0f} MB")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    context = DataContext.get_current()
    context.enable_progress_bars = False
    block_bytes = context.target_max_block_size
    try:
        for run in range(RUNS):
            speeds = []
            for work in (plain_ray_data, pipeline):
                # A job sets this for its own shards.
                context.target_max_block_size = block_bytes
                began_s = time.monotonic()
                work(source, folder / f"{work.__name__}-{run}")
                speeds.append(count / (time.monotonic() - began_s))
            memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"plain Ray Data {speeds[0]:,.0f} rows/s, this pipeline {speeds[1]:,.0f} rows/s "
                f"({speeds[1] / speeds[0]:.2f} x); driver's peak {memory_mb:,.0f} MiB"
            )
    finally:
        ray.shutdown()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
