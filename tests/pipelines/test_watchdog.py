"""How long a job waits for a cluster in which no engine is alive."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.errors import JobError
from pipelines.watchdog import Need, Room, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(Need("GPU", 2), 60, clock, lambda need: Room(nodes=3, alive=1, free=0))


def test_no_engine_for_as_long_as_is_set_ends_the_job_and_says_what_is_missing(clock: Clock):
    dog = watchdog(clock)
    clock.now_s += 59.9
    dog.see(alive=0)
    clock.now_s += 0.1
    with pytest.raises(JobError) as caught:
        dog.see(alive=0)
    assert str(caught.value) == (
        "no engine has been alive for 60 s (lost_after_s): each asks for 2 of a node's GPUs, and the "
        "cluster has 1 on 3 nodes that are alive, 0 of them free; what is written stays, and the same "
        "command goes on when there is room"
    )


def test_one_that_is_alive_may_take_any_time_and_a_new_one_is_waited_for_as_long_again(clock: Clock):
    dog = watchdog(clock)
    for _ in range(100):
        clock.now_s += 3600
        dog.see(alive=1)
    clock.now_s += 59
    dog.see(alive=0)
    dog.see(alive=1)
    clock.now_s += 59
    dog.see(alive=0)
    clock.now_s += 1
    with pytest.raises(JobError):
        dog.see(alive=0)


def test_the_actors_of_all_operators_count(clock: Clock):
    class Operator:
        def __init__(self, running: int) -> None:
            self.running = running

        def get_actor_info(self) -> Any:
            return self

    class Executor:
        def __init__(self, *running: int) -> None:
            self._topology = {Operator(count): None for count in running}

    dog = watchdog(clock)
    clock.now_s += 60
    dog.on_execution_step(Executor(0, 1))
    clock.now_s += 60
    with pytest.raises(JobError):
        dog.on_execution_step(Executor(0, 0))
