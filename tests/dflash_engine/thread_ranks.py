"""Several ranks in one process: a thread each, which meet at a barrier instead of in NCCL."""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from dflash_engine.config import EngineConfig
from dflash_engine.crew import light
from dflash_engine.shard import Rank, Shard
from dflash_engine.worker import Stopped, serve


class Meeting:
    """Where the ranks give each other what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, thing: Any) -> list[Any]:
        self._given[rank] = thing
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything

    def end(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_gather(self, part: Tensor) -> Tensor:
        assert part.is_contiguous()
        return torch.stack(self._meeting.exchange(self.rank, part.clone()))


def on_every_rank(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    """What `work` returns on each of `size` ranks."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with torch.inference_mode():
                results[number] = work(rank_of(meeting, number))
        except BaseException as error:
            errors.append(error)
            meeting.end()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def rank_of(meeting: Meeting, number: int, followers: Any = None) -> Rank:
    def agree(mine: int) -> int:
        return min(meeting.exchange(number, mine))

    return Rank(Shard(number, meeting.size), ThreadGroup(meeting, number), agree, followers)


class ThreadCrew:
    """Stands in for `dflash_engine.crew.Crew`; what is told goes through pickle, as through a pipe."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._meeting = Meeting(config.tensor_parallel_size)
        self._inboxes: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(1, self._meeting.size)]
        self.sizes: list[int] = []
        """Bytes of each message."""
        self.error = ""
        for number, inbox in enumerate(self._inboxes, 1):
            arguments = (config, rank_of(self._meeting, number), inbox)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, config: EngineConfig, rank: Rank, inbox: SimpleQueue[bytes]) -> None:
        try:
            serve(config, rank, lambda: pickle.loads(inbox.get()))
        except Stopped:
            pass
        except BaseException:
            self.error = traceback.format_exc()
            self._meeting.end()

    @property
    def rank(self) -> Rank:
        return rank_of(self._meeting, 0, followers=self)

    @contextmanager
    def starting(self) -> Iterator[None]:
        yield

    def tell(self, told: object) -> None:
        data = pickle.dumps(light(told))
        self.sizes.append(len(data))
        for inbox in self._inboxes:
            inbox.put(data)

    def check(self) -> None:
        assert not self.error, self.error

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(pickle.dumps(None))
