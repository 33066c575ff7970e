"""Rows a second of a whole job without a model, beside plain Ray Data doing the same in the same run.

    .venv/bin/python -m tests.pipelines.bench_pipeline --rows 200000

Both read JSONL of chats and write Parquet on a cluster of two cores, once to the local disk and once to an S3
server in a process of its own. The engine answers at once, and in Ray Data an actor hands its batches on.
Runs alternate, and so does who goes first; each one counts from the call to the last object. The driver's
memory is the peak of a process that runs one job and nothing else. The last line is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pyarrow.fs
import ray
import ray.data
from ray.cluster_utils import Cluster
from ray.data import ActorPoolStrategy, DataContext

from dflash_engine.fake import WORDS
from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from tests.pipelines.helpers import jsonl
from tests.pipelines.s3_server import moto_server

CORES = 2
FEW_ROWS = 20_000
BUCKET = "bench"
AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    # Arrow's S3 client asks it, and waits for its time-out, once in each process of Ray Data.
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where both write to."""

    name: str
    folder: str
    endpoint_url: str | None = None

    def filesystem(self) -> pyarrow.fs.FileSystem | None:
        if self.endpoint_url is None:
            return None
        return pyarrow.fs.S3FileSystem(endpoint_override=urlsplit(self.endpoint_url).netloc, scheme="http")


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


def plain_ray_data(source: Path, target: Target, name: str) -> None:
    rows = ray.data.read_json(str(source))
    identity = rows.map_batches(Identity, compute=ActorPoolStrategy(size=1), num_cpus=1)
    identity.write_parquet(f"{target.folder}/{name}", filesystem=target.filesystem())


def pipeline(source: Path, target: Target, name: str) -> None:
    config = BatchConfig(
        input=str(source),
        output=f"{target.folder}/{name}",
        engine={"model": "fake", "max_num_seqs": 256},
        sampling={"max_tokens": 8},
        shard={"rows": 4096},
        storage={"endpoint_url": target.endpoint_url},
    )
    run_batch(config, io.StringIO())


@contextmanager
def cluster(nodes: int = 1) -> Iterator[None]:
    """One node with all cores; or several on this machine, with a core each."""
    made = None
    if nodes > 1:
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",
            num_cpus=CORES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    try:
        yield
    finally:
        ray.shutdown()
        if made is not None:
            made.shutdown()


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server in a process of its own, with an empty bucket."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        url = ours.recv()
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        ours.send(None)
        process.join()


def _serve(pipe: Connection) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with moto_server() as url:
        pipe.send(url)
        pipe.recv()


def compare(source: Path, target: Target, rows: int, runs: int) -> dict[str, Any]:
    """Rows a second of both in each run, and the ratios."""
    speeds: dict[str, list[float]] = {"ray_data": [], "pipeline": []}
    systems: list[tuple[str, Callable[[Path, Target, str], None]]] = [
        ("ray_data", plain_ray_data),
        ("pipeline", pipeline),
    ]
    block_bytes = DataContext.get_current().target_max_block_size
    for run in range(runs):
        for name, work in systems if run % 2 == 0 else reversed(systems):
            # A job sets this for its own shards.
            DataContext.get_current().target_max_block_size = block_bytes
            began_s = time.monotonic()
            work(source, target, f"{name}-{run}")
            speeds[name].append(rows / (time.monotonic() - began_s))
        plain, ours = speeds["ray_data"][-1], speeds["pipeline"][-1]
        print(
            f"{target.name}: Ray Data {plain:,.0f} rows/s, ours {ours:,.0f} rows/s ({ours / plain:.2f} x)",
            flush=True,
        )
    ratios = [other / one for one, other in zip(speeds["ray_data"], speeds["pipeline"], strict=True)]
    return {
        "ray_data_rows_per_s": [round(speed) for speed in speeds["ray_data"]],
        "pipeline_rows_per_s": [round(speed) for speed in speeds["pipeline"]],
        "ratios": [round(ratio, 2) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 2),
    }


def driver_peak_mib(rows: int) -> int:
    """Peak memory of a process that runs one job of so many rows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone,
    ):
        source = Path(folder) / "in.jsonl"
        source.write_bytes(jsonl(chats(rows)))
        return alone.submit(_peak_mib, source, Target("local", folder)).result()


def _peak_mib(source: Path, target: Target) -> int:
    with cluster():
        pipeline(source, target, "out")
    # Not getrusage: its peak begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1, help="of Ray, all on this machine")
    parser.add_argument("--only", choices=["local", "s3", "memory"])
    args = parser.parse_args()
    wanted = [args.only] if args.only else ["local", "s3", "memory"]
    os.environ.update(AWS)
    found: dict[str, Any] = {"rows": args.rows, "cores": CORES, "nodes": args.nodes}
    with tempfile.TemporaryDirectory() as folder, s3_server() as url:
        source = Path(folder) / "in.jsonl"
        source.write_bytes(jsonl(chats(args.rows)))
        found["input_mb"] = round(source.stat().st_size / 1e6, 1)
        targets = [Target("local", folder), Target("s3", f"s3://{BUCKET}", url)]
        with cluster(args.nodes):
            for target in targets:
                if target.name in wanted:
                    found[target.name] = compare(source, target, args.rows, args.runs)
    if "memory" in wanted:
        found["driver_peak_mib"] = {rows: driver_peak_mib(rows) for rows in (FEW_ROWS, args.rows)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
