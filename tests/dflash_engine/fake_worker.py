"""Workers for `test_crew.py` with a real pipe and a real group, and no models."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dflash_engine import worker
from dflash_engine.config import EngineConfig
from dflash_engine.errors import ConfigError
from dflash_engine.plan import StepPlan
from dflash_engine.shard import Rank

Serve = Callable[[EngineConfig, Rank, Callable[[], object]], None]


def echo(file_descriptor: int) -> None:
    """Agrees twice, on its rank's number, and then gathers in each round the seed plus ten times its rank."""

    def serve(config: EngineConfig, rank: Rank, receive: Callable[[], object]) -> None:
        number = rank.shard.rank
        rank.agree(number)
        rank.agree(number)
        while True:
            told = worker._told(receive)
            assert isinstance(told, StepPlan)
            seed = told.rows[0].seed
            if seed < 0:
                raise ValueError(f"a seed of {seed}")
            rank.group.all_gather(torch.tensor([seed + 10.0 * number]))

    _run(serve, file_descriptor)


def refuse(file_descriptor: int) -> None:
    def serve(config: EngineConfig, rank: Rank, receive: Callable[[], object]) -> None:
        raise ConfigError("there is no room on this one")

    _run(serve, file_descriptor)


def stuck(file_descriptor: int) -> None:
    """As if it waited for a device that never answers."""

    def serve(config: EngineConfig, rank: Rank, receive: Callable[[], object]) -> None:
        threading.Event().wait()

    _run(serve, file_descriptor)


def _run(serve: Serve, file_descriptor: int) -> None:
    vars(worker)["serve"] = serve
    worker.main(file_descriptor)
