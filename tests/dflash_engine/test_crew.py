"""The ranks of an engine as processes: what they say to each other, and how they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dflash_engine import SamplingParams, crew
from dflash_engine.config import EngineConfig
from dflash_engine.crew import Crew
from dflash_engine.errors import ConfigError, EngineDead
from dflash_engine.plan import RowPlan, StepPlan

CPU = torch.device("cpu")
FAKE = (
    "import sys; sys.path[:] = sys.argv[2:]; from tests.dflash_engine import fake_worker; "
    "fake_worker.{}(int(sys.argv[1]))"
)
NOBODY = "nowhere"


def config(size: int = 2) -> EngineConfig:
    return EngineConfig(model=NOBODY, device="cpu", ops="reference", tensor_parallel_size=size)


@pytest.fixture
def fake(monkeypatch):
    def use(name: str) -> None:
        monkeypatch.setattr(crew, "_START", FAKE.format(name))

    return use


def plan(seed: int) -> StepPlan:
    row = RowPlan(1, 0, (1,), 0, True, [0], SamplingParams(), seed, (), ())
    return StepPlan((row,), on_host=True)


def ended(pid: int, within_s: float = 30) -> bool:
    """Waits for a process that need not be a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], within_s)[0])
    finally:
        os.close(handle)


def test_ranks_agree_on_the_least_number_follow_rounds_and_end_when_nobody_refers_to_them(fake) -> None:
    fake("echo")
    started = Crew(config(3), CPU)
    processes = started._watch._processes
    assert (started.agree(70), started.agree(-2)) == (1, -2)
    rank = started.rank
    for seed in (5, 6):
        started.tell(plan(seed))
        gathered = rank.group.all_gather(torch.tensor([float(seed)]))
        assert gathered.tolist() == [[seed], [10 + seed], [20 + seed]]
    started.check()
    del started, rank
    assert [process.returncode for process in processes] == [0, 0]


def test_a_worker_that_is_killed_is_named_and_takes_the_others_with_it(fake) -> None:
    fake("echo")
    started = Crew(config(3), CPU)
    assert (started.agree(0), started.agree(0)) == (0, 0)
    first, second = (process.pid for process in started._watch._processes)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 2 of 3 has ended: it said nothing and its exit status is -9"):
        started.rank.group.all_gather(torch.zeros(1))
    assert ended(first)
    with pytest.raises(EngineDead, match="rank 2 of 3"):
        started.check()
    with pytest.raises(EngineDead, match="rank 2 of 3"):
        started.tell(plan(1))
        started.tell(plan(1))


def test_a_worker_that_fails_in_a_round_says_why(fake) -> None:
    fake("echo")
    started = Crew(config(), CPU)
    assert (started.agree(0), started.agree(0)) == (0, 0)
    started.tell(plan(-1))
    with pytest.raises(EngineDead, match=r"(?s)rank 1 of 2 has ended: Traceback .*ValueError: a seed of -1"):
        started.rank.group.all_gather(torch.zeros(1))


def test_what_a_worker_cannot_start_with_is_a_config_error(fake) -> None:
    fake("refuse")
    started = Crew(config(), CPU)
    with (
        pytest.raises(ConfigError, match=r"^rank 1 of 2 has ended: there is no room on this one$"),
        started.starting(),
    ):
        started.agree(0)


def test_a_worker_that_cannot_even_begin_is_a_config_error_too(monkeypatch) -> None:
    monkeypatch.setattr(crew, "_START", "import sys; sys.exit(3)")
    with pytest.raises(ConfigError, match=r"rank 1 of 2 has ended: .* exit status is 3"):
        Crew(config(), CPU)


LEADER = """
import os, sys, torch
from dflash_engine import crew
from dflash_engine.config import EngineConfig
crew._START = sys.argv[1]
started = crew.Crew(EngineConfig(ops="reference", tensor_parallel_size=2), torch.device("cpu"))
print(started._watch._processes[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_end_with_rank_0_also_while_they_wait_for_the_device() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", LEADER, FAKE.format("stuck")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert ended(int(done.stdout))
