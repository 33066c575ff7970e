"""How batches end, and what becomes of them when something breaks on the way."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from pipelines.lease_object import LeaseRecord, swap_lease
from pipelines.processes import ProcessMark
from pipelines.service.batch_submitter import JobAsked, JobEnd
from pipelines.storage import open_store
from tests.pipelines.service.batch_world import (
    DAY_S,
    LINES,
    Clock,
    batch_world,
    check_answers,
    lines_of,
    submit,
)
from tests.pipelines.service.scripted_jobs import ScriptedSubmitter


def test_a_cancelled_batch_keeps_what_is_done(tmp_path):
    submitter = ScriptedSubmitter(hold_at=2)
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        made = submit(api, LINES)
        assert submitter.holding.wait(60)
        asked = api.batches.cancel(made.id)
        assert asked.status in ("cancelling", "cancelled") and asked.cancelling_at
        done = here.until(api, made.id, "cancelled")
        assert submitter.num_running == 0
        assert done.cancelled_at and done.finalizing_at is None
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 4, 0)
        check_answers(api, done, LINES[:4])
        assert done.error_file_id is None
        assert api.batches.cancel(made.id).status == "cancelled"
        submitter.hold_at = None
        whole = here.until(api, submit(api, LINES).id, "completed")
        with pytest.raises(openai.BadRequestError, match="completed cannot be cancelled"):
            api.batches.cancel(whole.id)


def test_a_batch_that_waits_for_its_turn_can_be_cancelled(tmp_path):
    submitter = ScriptedSubmitter(hold_at=0)
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        submit(api, LINES)
        assert submitter.holding.wait(60)
        waiting = submit(api, LINES)
        here.until(api, waiting.id, "in_progress")
        api.batches.cancel(waiting.id)
        assert here.until(api, waiting.id, "cancelled").output_file_id is None
    assert len(submitter.started) == 1


def test_progress_is_seen_while_the_job_runs(tmp_path):
    submitter = ScriptedSubmitter(hold_at=2)
    with batch_world(tmp_path, submitter, poll_s=0.01) as here, here.client() as api:
        made = submit(api, LINES)
        with here.changed:
            assert here.changed.wait_for(
                lambda: api.batches.retrieve(made.id).request_counts.completed == 4, timeout=60
            )
        assert api.batches.retrieve(made.id).status == "in_progress"


def test_an_expired_batch_has_what_is_done_and_an_error_for_every_other_line(tmp_path):
    submitter, clock = ScriptedSubmitter(hold_at=1), Clock()
    with batch_world(tmp_path, submitter, clock=clock) as here, here.client() as api:
        keep: Any = {"anchor": "created_at", "seconds": 7200}
        made = submit(api, LINES, output_expires_after=keep)
        assert submitter.holding.wait(60)
        clock.now += DAY_S + 1
        # Another batch wakes the controller; this one's turn has long come.
        submit(api, LINES)
        done = here.until(api, made.id, "expired")
        assert done.expired_at == int(clock.now)
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 2, 0)
        check_answers(api, done, LINES[:2])
        errors = lines_of(api, done.error_file_id)
        assert [line["custom_id"] for line in errors] == [line["custom_id"] for line in LINES[2:]]
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        assert all(line["response"] is None for line in errors)
        file = api.files.retrieve(done.output_file_id)
        assert file.expires_at == file.created_at + 7200


def test_a_new_controller_goes_on_with_what_the_last_one_left(tmp_path):
    first, second = ScriptedSubmitter(hold_at=2), ScriptedSubmitter()
    with batch_world(tmp_path, first) as here, here.client() as api:
        made = submit(api, LINES)
        assert first.holding.wait(60)
    assert first.num_running == 0
    assert len(first.written) == 2
    with batch_world(tmp_path, second) as here, here.client() as api:
        done = here.until(api, made.id, "completed")
        check_answers(api, done, LINES)
        assert done.in_progress_at and done.request_counts.completed == 7
    # Nothing was done twice, and nothing was left to do for a third.
    assert second.written and not set(first.written) & set(second.written)
    with batch_world(tmp_path, ScriptedSubmitter(ends=[JobEnd(2)])) as here, here.client() as api:
        assert api.batches.retrieve(made.id).status == "completed"
        assert here.batches.batches.open_batches() == []


@pytest.mark.parametrize("outcome", ["completed", "cancelled"])
def test_a_crash_between_the_files_and_the_end_leaves_one_pair_of_files(tmp_path, monkeypatch, outcome):
    submitter = ScriptedSubmitter(hold_at=1 if outcome == "cancelled" else None)
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        update = here.batches.batches.update
        died = threading.Event()

        def dying(key, change):
            if here.batches.batches.find(key).ending is not None and not died.is_set():
                died.set()
                raise RuntimeError("died")
            return update(key, change)

        monkeypatch.setattr(here.batches.batches, "update", dying)
        made = submit(api, LINES)
        if outcome == "cancelled":
            assert submitter.holding.wait(60)
            api.batches.cancel(made.id)
            submitter.hold_at = None
        assert died.wait(60)
        # The controller takes it up again when it next looks, which another batch makes it do.
        other = submit(api, LINES)
        here.until(api, other.id, "completed")
        assert here.until(api, made.id, outcome).output_file_id
        files = [file.id for file in api.files.list(purpose="batch_output")]
        assert len(files) == 2


def test_a_job_that_breaks_off_is_tried_again(tmp_path):
    submitter = ScriptedSubmitter(ends=[JobEnd(1, "a node went"), JobEnd(-9)])
    with batch_world(tmp_path, submitter, poll_s=0.01) as here, here.client() as api:
        done = here.until(api, submit(api, LINES).id, "completed")
        check_answers(api, done, LINES)
    assert len(submitter.started) == 3


@pytest.mark.parametrize(("exit_code", "code"), [(2, "job_refused"), (3, "budget_exceeded")])
def test_a_job_that_cannot_go_on_fails_its_batch_without_telling_what_is_inside(tmp_path, exit_code, code):
    submitter = ScriptedSubmitter(ends=[JobEnd(exit_code, "secret")])
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        failed = here.until(api, submit(api, LINES).id, "failed", "completed")
        (error,) = failed.errors.data
        assert error.code == code
        assert "secret" not in error.message


def test_a_batch_whose_file_is_deleted_fails(tmp_path):
    submitter = ScriptedSubmitter(hold_at=0)
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        running = submit(api, LINES)
        assert submitter.holding.wait(60)
        # Waits for the slot of the first.
        waiting = submit(api, LINES)
        here.until(api, waiting.id, "in_progress")
        api.files.delete(waiting.input_file_id)
        submitter.hold_at = None
        api.batches.cancel(running.id)
        failed = here.until(api, waiting.id, "failed", "completed")
        assert [error.code for error in failed.errors.data] == ["job_refused"]


def test_a_job_of_a_service_that_has_just_died_is_waited_for(tmp_path):
    class Orphaned(ScriptedSubmitter):
        async def run(self, asked: JobAsked) -> JobEnd:
            if len(self.started) == 1:
                mark = ProcessMark("other", 1, "1")
                orphan = LeaseRecord(owner="x", epoch=1, duration_s=5, host="elsewhere", process=mark)
                swap_lease(open_store(asked.output), orphan, None)
                return JobEnd(2, "another driver writes this output")
            return await super().run(asked)

    submitter = Orphaned()
    with batch_world(tmp_path, submitter, poll_s=0.01) as here, here.client() as api:
        check_answers(api, here.until(api, submit(api, LINES).id, "completed", "failed"), LINES)
    assert len(submitter.started) == 2
