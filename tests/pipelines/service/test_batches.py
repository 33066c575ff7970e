"""Batches, made and followed with OpenAI's own client; their jobs are run without Ray."""

from __future__ import annotations

from typing import Any

import openai
import orjson
import pytest
import yaml

from pipelines.service.keys import key_hash
from tests.pipelines.s3_server import S3
from tests.pipelines.service.batch_world import (
    CHAT,
    DAY_S,
    LINES,
    MODEL,
    TEXT,
    batch_world,
    by_custom_id,
    chat_line,
    check_answers,
    lines_of,
    submit,
    upload,
)
from tests.pipelines.service.scripted_jobs import ScriptedSubmitter


def test_a_batch_answers_every_line_as_a_direct_request_is_answered(tmp_path):
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        made = submit(api, LINES, metadata={"team": "night"})
        assert (made.object, made.status, made.endpoint) == ("batch", "validating", CHAT)
        assert made.expires_at == made.created_at + DAY_S
        done = here.until(api, made.id, "completed", "failed")
        assert done.status == "completed"
        assert (done.id, done.input_file_id, done.metadata) == (made.id, made.input_file_id, made.metadata)
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (7, 7, 0)
        assert done.error_file_id is None and done.errors is None
        times = [done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at]
        assert times == sorted(times)
        assert (done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at) == (None,) * 4
        check_answers(api, done, LINES)
        answers = lines_of(api, done.output_file_id)
        usages = [line["response"]["body"]["usage"] for line in answers]
        assert done.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
        assert done.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
        assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
        cost = sum(usage["cost_usd"] for usage in usages)
        assert done.usage.model_extra["cost_usd"] == pytest.approx(cost) and cost > 0
        file = api.files.retrieve(done.output_file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{done.id}_output.jsonl")
        assert file.expires_at is None
        # The answers are in the file, which may be deleted, and nowhere else.
        assert not [path for path in tmp_path.rglob("jobs/*/*/data/*") if path.suffix == ".jsonl"]


def test_ids_of_answers_do_not_repeat_from_batch_to_batch(tmp_path):
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        file = upload(api, LINES)
        seen: list[str] = []
        for _ in range(2):
            made = api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
            for line in lines_of(api, here.until(api, made.id, "completed").output_file_id):
                seen += [line["id"], line["response"]["request_id"], line["response"]["body"]["id"]]
    assert len(set(seen)) == len(seen) == 2 * 3 * 7


def test_text_completions_are_a_batch_of_their_own(tmp_path):
    ask: Any = {"model": MODEL, "prompt": "one two", "max_tokens": 5, "temperature": 0}
    lines = [{"custom_id": "t", "method": "POST", "url": TEXT, "body": ask}]
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        done = here.until(api, submit(api, lines, TEXT).id, "completed", "failed")
        (line,) = lines_of(api, done.output_file_id)
        alone = api.completions.create(**ask)
    body = openai.types.Completion.model_validate(line["response"]["body"])
    assert body.choices[0].text == alone.choices[0].text


def test_a_bad_request_is_an_error_of_its_own_and_the_others_are_answered(tmp_path):
    bad = [chat_line("cold", "hi", temperature=-1), chat_line("tools", "hi", tools=[{"type": "function"}])]
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        done = here.until(api, submit(api, [bad[0], *LINES, bad[1]]).id, "completed")
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (9, 7, 2)
        check_answers(api, done, LINES)
        errors = by_custom_id(lines_of(api, done.error_file_id))
        assert errors.keys() == {"cold", "tools"}
        for line in bad:
            with pytest.raises(openai.BadRequestError):
                api.chat.completions.create(**line["body"])
            assert errors[line["custom_id"]]["response"]["status_code"] == 400
        assert "temperature" in errors["cold"]["response"]["body"]["error"]["message"]
        only = here.until(api, submit(api, bad).id, "completed")
        assert only.output_file_id is None
        assert len(lines_of(api, only.error_file_id)) == 2


def test_a_file_that_is_no_batch_fails_with_the_numbers_of_its_lines(tmp_path):
    submitter = ScriptedSubmitter()
    content = b"\n".join([orjson.dumps(LINES[0]), b"not JSON", b"", orjson.dumps(LINES[0])])
    with batch_world(tmp_path, submitter) as here, here.client() as api:
        failed = here.until(api, submit(api, content).id, "failed", "completed")
        assert failed.status == "failed" and failed.failed_at
        assert [(error.line, error.code) for error in failed.errors.data] == [
            (2, "invalid_json_line"),
            (4, "duplicate_custom_id"),
        ]
        assert failed.in_progress_at is None
        wrong = here.until(api, submit(api, LINES, TEXT).id, "failed", "completed")
        assert {error.code for error in wrong.errors.data} == {"invalid_url"}
    assert submitter.started == []


def test_nobody_sees_the_batches_of_another_key_or_makes_one_of_its_files(tmp_path):
    keys = tmp_path / "keys.yaml"
    entries = [{"hash": key_hash(f"sk-{name}"), "owner": name} for name in ("alice", "bob")]
    keys.write_text(yaml.safe_dump({"keys": entries}))
    service = {"keys": keys}
    with batch_world(tmp_path / "root", ScriptedSubmitter(), service=service) as here:
        alice, bob = here.client("sk-alice"), here.client("sk-bob")
        made = submit(alice, LINES)
        done = here.until(alice, made.id, "completed")
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no such batch"):
                ask(made.id)
        assert list(bob.batches.list()) == []
        for file in (done.output_file_id, done.input_file_id):
            with pytest.raises(openai.NotFoundError):
                bob.files.content(file)
            with pytest.raises(openai.BadRequestError, match="no such file"):
                bob.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        assert [batch.id for batch in alice.batches.list()] == [made.id]
        assert here.http.get(f"{here.url}/v1/batches").status_code == 401


def test_batches_are_listed_from_the_latest_in_pages(tmp_path):
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        file = upload(api, LINES)
        made = [
            api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id
            for _ in range(5)
        ]
        assert [batch.id for batch in api.batches.list(limit=2)] == made[::-1]
        page = api.batches.list(limit=2, after=made[3])
        assert [batch.id for batch in page.data] == [made[2], made[1]]
        assert page.has_more
        for batch in made:
            here.until(api, batch, "completed")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, None),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_name(tmp_path, change, param):
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        ask = {"input_file_id": upload(api, LINES), "endpoint": CHAT, "completion_window": "24h", **change}
        answer = here.http.post(f"{here.url}/v1/batches", json=ask)
        assert answer.status_code == 400, answer.text
        if param is not None:
            assert answer.json()["error"]["param"] == param
        assert list(api.batches.list()) == []


def test_an_output_file_is_no_input_file(tmp_path):
    with batch_world(tmp_path, ScriptedSubmitter()) as here, here.client() as api:
        done = here.until(api, submit(api, LINES).id, "completed")
        with pytest.raises(openai.BadRequestError, match="purpose is batch_output"):
            api.batches.create(input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h")


def test_files_and_batches_in_a_bucket(s3: S3):
    storage = s3.settings()
    submitter = ScriptedSubmitter(storage=storage, hold_at=2)
    root = f"s3://{s3.bucket}/service"
    with batch_world(root, submitter, storage=storage) as here, here.client() as api:
        made = submit(api, LINES)
        assert submitter.holding.wait(60)
    submitter = ScriptedSubmitter(storage=storage)
    with batch_world(root, submitter, storage=storage) as here, here.client() as api:
        done = here.until(api, made.id, "completed")
        check_answers(api, done, LINES)
        api.files.delete(done.output_file_id)
        with pytest.raises(openai.NotFoundError):
            api.files.content(done.output_file_id)
    # Who changes a batch says which version of it.
    puts = [request for request in s3.proxy.sent("PUT", "/batches/") if "batch_" in request.target]
    assert len(puts) >= 4
    assert all(request.headers.keys() & {"If-Match", "If-None-Match"} for request in puts)
