"""One driver at a time: refused while the first lives, let in when it has ended, died or gone silent."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.errors import JobError, JobRefused
from pipelines.lease import Lease, LeaseHeld, LeaseLost, take_lease
from pipelines.lease_object import LEASE_KEY, LeaseRecord, read_lease
from pipelines.processes import ProcessMark, seconds_since_boot, this_process
from pipelines.storage import LocalStore

SHORT_S = 0.3
LONG_S = 60.0
ELSEWHERE = ProcessMark("another machine", 1, "1")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "out")


def take(store: LocalStore, duration_s: float = LONG_S) -> Lease:
    return take_lease(store, duration_s, io.StringIO())


def holds(store: LocalStore, process: ProcessMark, duration_s: float, age_s: float = 0.0) -> LeaseRecord:
    """Leave a lease of a driver that renews it no more."""
    record = LeaseRecord(owner="other", epoch=4, duration_s=duration_s, host="there", process=process)
    record = record.renewed(seconds_since_boot() - age_s)
    store.put(LEASE_KEY, record.as_bytes())
    return record


@pytest.fixture
def ended() -> Iterator[ProcessMark]:
    """A process of this machine that was killed and that nobody has waited for yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    mark = replace(this_process(), pid=process.pid, start_time=start_time(process.pid))
    assert not mark.is_gone()
    process.kill()
    while not mark.is_gone():
        pass
    yield mark
    process.communicate()


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew a long lease, and look at it, every tenth of a second."""
    monkeypatch.setattr("pipelines.lease.RENEWALS_A_DURATION", LONG_S * 10)
    monkeypatch.setattr("pipelines.lease.TRIES_A_DURATION", LONG_S * 10)


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_second_driver_is_refused_at_once_and_told_who_is_at_work(store: LocalStore):
    with take(store):
        with pytest.raises(LeaseHeld, match=r"another driver \(process \d+ on .*\): its lease runs for 60 s"):
            take(store)
        assert LeaseHeld.exit_code == JobRefused.exit_code == 2


def test_a_lease_that_was_given_back_is_free_at_once_and_epochs_count_its_owners(store: LocalStore):
    epochs = []
    for _ in range(3):
        with take(store) as lease:
            epochs.append(lease.epoch)
    assert epochs == [1, 2, 3]


def test_a_driver_killed_on_this_machine_is_followed_at_once(store: LocalStore, ended: ProcessMark):
    holds(store, ended, LONG_S)
    with take(store) as lease:
        assert lease.epoch == 5


def test_a_silent_driver_on_this_machine_is_followed_when_its_time_has_run_out(store: LocalStore):
    holds(store, this_process(), LONG_S, age_s=LONG_S - 30)
    with pytest.raises(LeaseHeld, match="its lease runs for 30 s"):
        take(store)
    holds(store, this_process(), LONG_S, age_s=LONG_S)
    with take(store) as lease:
        assert lease.epoch == 5


def test_a_silent_driver_elsewhere_is_followed_after_the_whole_time_of_its_lease(store: LocalStore):
    # Its clock says that the lease ran out long ago, which says nothing here.
    holds(store, ELSEWHERE, SHORT_S, age_s=1000)
    log = io.StringIO()
    started_s = seconds_since_boot()
    with take_lease(store, LONG_S, log) as lease:
        assert seconds_since_boot() - started_s >= SHORT_S
        assert lease.epoch == 5
    assert "takes over when nothing is heard of it for 0.3 s" in log.getvalue()


def test_a_driver_elsewhere_that_renews_keeps_its_output(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.lease.this_process", lambda: ELSEWHERE)
    often(monkeypatch)
    with take(store) as first:
        with pytest.raises(LeaseHeld, match="it has just renewed its lease"):
            take(store)
        first.check()


def test_of_drivers_that_wait_together_one_follows(store: LocalStore):
    holds(store, ELSEWHERE, SHORT_S)
    leases: list[Lease] = []
    refused: list[JobError] = []

    def wait() -> None:
        try:
            leases.append(take(store))
        except JobRefused as error:
            refused.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(leases), len(refused)) == (1, 3)
    with leases[0]:
        pass


def test_a_driver_whose_lease_was_taken_over_commits_nothing_more_and_leaves_it_alone(store: LocalStore):
    lost = threading.Event()
    with take(store, SHORT_S) as lease:
        lease.when_lost(lambda reason: lost.set())
        taken = holds(store, ELSEWHERE, LONG_S)
        assert lost.wait(10)
        with pytest.raises(LeaseLost, match="another driver has taken it over"):
            lease.check()
    assert read_lease(store)[0] == taken


class Failing(LocalStore):
    """Puts fail after they succeeded, or without, for as long as is said."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.failing = ""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._fail(super().put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        if self.failing == "before":
            raise JobError("the store is away")
        return self._fail(super().put_if_match(key, data, etag))

    def _fail(self, done: bool) -> bool:
        if self.failing == "after":
            raise JobError("the answer was lost")
        return done


def test_a_put_that_fails_after_it_succeeded_counts(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    often(monkeypatch)
    failing = Failing(Path(store.uri))
    failing.failing = "after"
    with take(failing) as lease:
        before = read_lease(store)[0]
        while (now := read_lease(store)[0]).renewals < before.renewals + 3:
            lease.check()
        assert now.owner == before.owner


def test_a_lease_that_cannot_be_renewed_in_its_time_is_lost_to_its_owner_first(store: LocalStore):
    failing = Failing(Path(store.uri))
    lost = threading.Event()
    with take(failing, SHORT_S) as lease:
        lease.when_lost(lambda reason: lost.set())
        failing.failing = "before"
        assert lost.wait(10)
        with pytest.raises(LeaseLost, match=r"could not be renewed for 0\.3 s"):
            lease.check()


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JobRefused, match=r"output .*file/out cannot be written"):
        take(LocalStore(tmp_path / "file" / "out"))
