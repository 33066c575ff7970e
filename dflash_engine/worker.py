"""A rank of a tensor-parallel engine that follows rank 0, in a process of its own; see `crew.py`."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn

from dflash_engine.config import EngineConfig
from dflash_engine.crew import Orders
from dflash_engine.devices import select_device
from dflash_engine.errors import ConfigError
from dflash_engine.fingerprint import device_kind
from dflash_engine.gpu_runner import GpuRunner, Round
from dflash_engine.loading import build_runner, read_models
from dflash_engine.plan import StepPlan
from dflash_engine.process_group import ProcessGroup, join_store
from dflash_engine.shard import Rank
from dflash_engine.sources import find
from dflash_engine.watch import Failed


class Stopped(Exception):
    """Rank 0 needs this rank no longer."""


def main(file_descriptor: int) -> NoReturn:
    """Serves until rank 0 says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is rank 0's to answer
    pipe = Connection(file_descriptor)
    status = 0
    try:
        orders = pipe.recv()
        assert isinstance(orders, Orders)
        _serve_process(pipe, orders)
    except (Stopped, EOFError):
        pass
    except ConfigError as error:
        pipe.send(Failed(str(error)))
        status = 1
    except BaseException:
        pipe.send(Failed(traceback.format_exc()))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors: they would wait for the device, which may be waiting for a rank that is gone.
    os._exit(status)


def _serve_process(pipe: Connection, orders: Orders) -> None:
    inbox: SimpleQueue[object] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), name="dflash-pipe", daemon=True).start()
    shard = orders.shard
    device = select_device(orders.config, shard.rank)
    pipe.send(device_kind(device))
    group = ProcessGroup(join_store(orders.port), shard.rank, shard.size, device)

    def agree(number: int) -> int:
        pipe.send(number)
        least = _told(inbox.get)
        assert isinstance(least, int)
        return least

    serve(orders.config, Rank(shard, group, agree), inbox.get)


def _read(pipe: Connection, inbox: SimpleQueue[object]) -> None:
    """Reads ahead of the work, so that the end of rank 0 is noticed whatever the work waits for."""
    while True:
        try:
            inbox.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(1)


def serve(config: EngineConfig, rank: Rank, receive: Callable[[], object]) -> None:
    """Builds the rank's part of the engine and runs the rounds that it receives; None ends it with `Stopped`.

    Raises `ConfigError` as `loading.load` does.
    """
    sources = find(config)
    loaded = read_models(config, sources, rank)
    runner = build_runner(config, sources, loaded, rank).runner
    while True:
        told = _told(receive)
        if isinstance(told, Round):
            assert isinstance(runner, GpuRunner)
            runner.follow(told)
        else:
            assert isinstance(told, StepPlan), told
            runner.execute(told)


def _told(receive: Callable[[], object]) -> object:
    told = receive()
    if told is None:
        raise Stopped
    return told
