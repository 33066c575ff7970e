"""What the pipeline costs a job that its engine keeps busy: the same rows by the engine alone and by a job.

    .venv/bin/python -m tests.pipelines.bench_engine_bound --rows 500 --max_tokens 32

Start-up (actor, model) is what a job of one row takes without that row's own time in the engine. The cluster
runs before. The last line is JSON; `times_engine` = (job - start-up) / engine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from dflash_engine.async_engine import AsyncEngine
from dflash_engine.config import EngineConfig
from dflash_engine.request import SamplingParams
from pipelines.answers import Answerer
from pipelines.batch import run_batch
from pipelines.cluster import ray_cluster
from pipelines.config import BatchConfig, ShardConfig
from pipelines.generate import QUEUED_PER_SEQUENCE
from pipelines.parse import RowParser


def config_of(rows: Path, output: Path, args: argparse.Namespace) -> BatchConfig:
    threads = len(os.sched_getaffinity(0))
    return BatchConfig(
        input=str(rows),
        output=str(output),
        engine=EngineConfig(draft=args.draft, max_num_seqs=args.width, max_model_len=2048, threads=threads),
        sampling=SamplingParams(max_tokens=args.max_tokens),
        shard=ShardConfig(rows=32),
    )


def engine_alone_s(rows: Path, config: BatchConfig) -> tuple[float, float]:
    """Seconds for the first row, and then for all."""
    parser = RowParser(config.sampling)
    lines = rows.read_bytes().splitlines()
    parsed = [parser.line(line, file="rows", offset=number) for number, line in enumerate(lines)]
    engine = AsyncEngine(config.engine)
    answerer = Answerer(
        engine, QUEUED_PER_SEQUENCE * config.engine.limit("max_num_seqs", "cpu"), config.seed, 1
    )

    async def answer() -> tuple[float, float]:
        asked = [row for row in parsed if row is not None]
        started = time.perf_counter()
        await answerer.answer_all(asked[:1])
        first = time.perf_counter()
        await answerer.answer_all(asked)
        ended = time.perf_counter()
        await engine.close()
        return first - started, ended - first

    return asyncio.run(answer())


def job_s(config: BatchConfig) -> float:
    started = time.perf_counter()
    summary = run_batch(config, sys.stderr)
    assert summary.totals.rows_error == 0, summary
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--max_tokens", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--draft", default=None)
    args = parser.parse_args()
    conversations = Path("configs/batch/customer_service.jsonl").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        many, one = root / "many.jsonl", root / "one.jsonl"
        many.write_text("\n".join((conversations * args.rows)[: args.rows]) + "\n", encoding="utf-8")
        one.write_text(conversations[0] + "\n", encoding="utf-8")
        first_s, alone_s = engine_alone_s(many, config_of(many, root / "none", args))
        with ray_cluster():
            startup_s = job_s(config_of(one, root / "first", args)) - first_s
            whole_s = job_s(config_of(many, root / "out", args))
    print(
        json.dumps(
            {
                "rows": args.rows,
                "engine_alone_s": round(alone_s, 2),
                "startup_s": round(startup_s, 2),
                "job_s": round(whole_s, 2),
                "times_engine": round((whole_s - startup_s) / alone_s, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
