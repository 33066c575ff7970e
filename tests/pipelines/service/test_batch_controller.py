"""One controller for all services of a root."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from pipelines.service.batch import Batch
from pipelines.service.batch_store import BatchStore
from pipelines.service.owner_folder import owner_folder
from pipelines.storage import open_store
from tests.pipelines.service.batch_world import CHAT, Clock, batch_world, chat_line, submit
from tests.pipelines.service.scripted_jobs import ScriptedSubmitter

LINES = [chat_line(f"c{number}", f"question {number}") for number in range(3)]
OWNER = owner_folder("night")


@pytest.fixture
def made(tmp_path):
    store = BatchStore(open_store(str(tmp_path)), Clock())
    key = store.new_key(OWNER)
    store.create(key, Batch(id=key.id, endpoint=CHAT, input_file_id="file-x", created_at=1, expires_at=2))
    return store, key


def test_a_second_service_stands_by_and_takes_over_when_the_first_one_ends(tmp_path):
    first, second = ScriptedSubmitter(hold_at=1), ScriptedSubmitter()
    with ExitStack() as stack:
        leader = stack.enter_context(batch_world(tmp_path, first, poll_s=0.02))
        running = submit(leader.client(), LINES)
        assert first.holding.wait(60)
        with batch_world(tmp_path, second, poll_s=0.02) as standby:
            api = standby.client()
            # Either service takes batches, and the leader runs them.
            waiting = submit(api, LINES)
            leader.until(api, waiting.id, "in_progress")
            assert (len(first.started), second.started) == (1, [])
            stack.close()
            assert standby.until(api, running.id, "completed").request_counts.completed == 3
            standby.until(api, waiting.id, "completed")
    assert len(second.started) == 2


def test_changes_of_two_at_once_are_both_kept(made):
    store, key = made
    num_threads, num_changes = 4, 10

    def change() -> None:
        for _ in range(num_changes):
            store.update(
                key,
                lambda batch: batch.model_copy(
                    update={
                        "request_counts": batch.request_counts.model_copy(
                            update={"total": batch.request_counts.total + 1}
                        )
                    }
                ),
            )

    threads = [threading.Thread(target=change) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.find(key).request_counts.total == num_threads * num_changes


def test_a_batch_that_has_ended_is_not_changed_any_more(made):
    store, key = made
    ended = store.update(key, lambda batch: batch.at("cancelled", 5))
    assert store.update(key, lambda batch: batch.at("completed", 6)) == ended
    assert store.find(key) == ended


def test_open_batches_are_found_until_they_are_closed(made):
    store, key = made
    other = store.new_key(owner_folder("day"))
    store.create(other, Batch(id=other.id, endpoint=CHAT, input_file_id="f", created_at=1, expires_at=2))
    assert store.open_batches() == sorted([key, other], key=lambda each: each.id)
    store.close(key)
    assert store.open_batches() == [other]
