"""Engines have work all the time, however unequal the answers are."""

from __future__ import annotations

import io
import logging
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

from dflash_engine.config import EngineConfig
from dflash_engine.fake import FakeEngine
from dflash_engine.request import Request, Result
from pipelines.batch import run_batch
from pipelines.config import BatchConfig
from tests.pipelines.helpers import jsonl

# Ray Data warns of its own deprecated settings when it sets their defaults.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.data"),
]

SLOTS = 8
ROWS = 600
TOKEN_S = 0.004


class Timed(FakeEngine):
    """Notes when each row begins and ends in a slot of the engine."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config)
        self._log = (folder / f"{os.getpid()}.log").open("a", buffering=1)
        self._taken = 0

    async def generate(self, request: Request) -> Result:
        began_s = 0.0
        async for chunk in self.submit(request):
            # The first token comes one token's time after the slot was taken.
            began_s = began_s or time.monotonic() - TOKEN_S
            if chunk.result is not None:
                self._log.write(f"{began_s} {time.monotonic()}\n")
                return chunk.result
        raise AssertionError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    yield
    ray.shutdown()


def test_slots_are_full_until_the_last_rows_and_the_pool_grows(tmp_path: Path):
    generator = random.Random(5)
    rows = [
        {"prompt": f"question {number}", "max_tokens": generator.randint(2, 400), "ignore_eos": True}
        for number in range(ROWS)
    ]
    (tmp_path / "in.jsonl").write_bytes(jsonl(rows))
    config = BatchConfig(
        input=str(tmp_path / "in.jsonl"),
        output=str(tmp_path / "out"),
        engine={"model": f"fake:{TOKEN_S}", "max_num_seqs": SLOTS},
        shard={"rows": 16},
        actors={"min": 1, "max": 2, "shards_in_flight": 4},
    )
    assert run_batch(config, io.StringIO(), partial(Timed, tmp_path)).totals.rows_ok == ROWS
    spans = [
        [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
        for file in tmp_path.glob("*.log")
    ]
    assert len(spans) == 2, "the pool did not grow"
    last_began_s = max(began_s for actor in spans for began_s, _ in actor)
    held_s = occupied_s = 0.0
    for actor in spans:
        held_s += SLOTS * (last_began_s - min(began_s for began_s, _ in actor))
        occupied_s += sum(min(ended_s, last_began_s) - began_s for began_s, ended_s in actor)
    print(f"busy share {occupied_s / held_s:.3f}")
    assert occupied_s / held_s >= 0.95
