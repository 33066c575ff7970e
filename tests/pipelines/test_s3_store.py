"""S3 when the network and the server do their worst: nothing half, nothing twice, and a clear sentence."""

from __future__ import annotations

import base64
import gzip
import io
import random
import zlib
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import s3_upload
from pipelines.errors import JobError, JobRefused, NotFound
from pipelines.s3_store import S3Store
from tests.pipelines.s3_server import S3, Fault, Rule

PART = 5 << 20  # the smallest that S3 takes


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "WHOLE_LIMIT_BYTES", PART)
    monkeypatch.setattr(s3_upload, "PART_BYTES", PART)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def uploads(s3: S3) -> list:
    return s3.direct.list_multipart_uploads(Bucket=s3.bucket).get("Uploads", [])


# Puts


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.LOST_ANSWER, Fault.CUT_REQUEST])
def test_a_put_goes_through_after_faults(s3: S3, fault: Fault):
    s3.proxy.rules.append(Rule(fault, "PUT", times=3))
    s3.store().put("key", noise(10_000))
    assert s3.store().get("key") == noise(10_000)
    assert len(s3.proxy.sent("PUT")) == 4


@pytest.mark.parametrize(
    ("status", "code"), [(429, "TooManyRequests"), (500, "InternalError"), (400, "RequestTimeout")]
)
def test_what_passes_is_tried_again(s3: S3, status: int, code: str):
    s3.proxy.rules.append(Rule(Fault.REFUSED, "PUT", status=status, code=code))
    s3.store().put("key", b"data")
    assert s3.store().get("key") == b"data"


def test_a_server_that_is_silent_is_asked_again(s3: S3):
    s3.proxy.rules.append(Rule(Fault.SILENCE, "PUT"))
    s3.store(timeout_s=0.3).put("key", b"data")
    assert s3.store().get("key") == b"data"


def test_a_put_is_given_up_after_its_tries_and_leaves_nothing(s3: S3):
    s3.proxy.rules.append(Rule(Fault.CUT_REQUEST, "PUT", times=99))
    with pytest.raises(JobError, match=f"cannot write s3://{s3.bucket}/root/key") as caught:
        s3.store(max_attempts=3).put("key", noise(10_000))
    assert not isinstance(caught.value, JobRefused)
    assert len(s3.proxy.sent("PUT")) == 3
    assert not s3.store().exists("key")


def test_a_put_carries_a_checksum_that_the_server_can_check(s3: S3):
    s3.store().put("key", b"data")
    sent = s3.proxy.sent("PUT")[0]
    assert base64.b64decode(sent.headers["x-amz-checksum-sha256"]) == sha256(sent.body).digest()


# Conditional puts


def test_a_put_that_is_first_and_whose_answer_is_lost_has_won(s3: S3):
    s3.proxy.rules.append(Rule(Fault.LOST_ANSWER, "PUT"))
    assert s3.store().put_if_absent("key", b"mine")
    assert s3.store().get("key") == b"mine"


def test_a_put_that_finds_the_same_words_of_someone_else_has_lost(s3: S3):
    other = s3.store()
    s3.proxy.rules.append(
        Rule(
            Fault.REFUSED,
            "PUT",
            before=lambda: s3.direct.put_object(Bucket=s3.bucket, Key="root/key", Body=b"same"),
        )
    )
    assert not other.put_if_absent("key", b"same")


def test_a_swap_whose_answer_is_lost_has_won(s3: S3):
    store = s3.store()
    store.put("lease", b"first")
    s3.proxy.rules.append(Rule(Fault.LOST_ANSWER, "PUT"))
    assert store.put_if_match("lease", b"second", store.info("lease").etag)
    assert store.get("lease") == b"second"


def test_a_swap_that_someone_was_faster_with_has_lost(s3: S3):
    store = s3.store()
    store.put("lease", b"first")
    etag = store.info("lease").etag
    s3.proxy.rules.append(
        Rule(
            Fault.REFUSED,
            "PUT",
            before=lambda: s3.direct.put_object(Bucket=s3.bucket, Key="root/lease", Body=b"other"),
        )
    )
    assert not store.put_if_match("lease", b"second", etag)
    assert store.get("lease") == b"other"


def test_a_conflict_with_another_writer_is_tried_again(s3: S3):
    rule = Rule(Fault.REFUSED, "PUT", status=409, code="ConditionalRequestConflict", times=2)
    s3.proxy.rules.append(rule)
    assert s3.store().put_if_absent("key", b"mine")
    assert rule.times == 0


def test_a_store_without_conditional_puts_is_refused(s3: S3):
    s3.proxy.rules.append(Rule(Fault.REFUSED, "PUT", status=501, code="NotImplemented"))
    with pytest.raises(JobRefused, match="does not know what is needed"):
        s3.store().put_if_absent("key", b"mine")


# Large puts


def test_large_data_go_up_in_parts_through_faults(s3: S3, small_parts: None):
    data = noise(3 * PART + 7)
    s3.proxy.rules.append(Rule(Fault.REFUSED, "POST", "?uploads"))
    s3.proxy.rules.append(Rule(Fault.LOST_ANSWER, "PUT", "partNumber=2"))
    s3.proxy.rules.append(Rule(Fault.CUT_REQUEST, "PUT", "partNumber=3"))
    s3.store().put("key", data)
    assert s3.store().get("key") == data
    assert {each.target.partition("partNumber=")[2][0] for each in s3.proxy.sent("PUT")} == set("1234")
    for part in s3.proxy.sent("PUT", "partNumber"):
        assert base64.b64decode(part.headers["x-amz-checksum-sha256"]) == sha256(part.body).digest()
    assert uploads(s3) == []


def test_a_large_put_shows_nothing_until_it_is_complete(s3: S3, small_parts: None):
    store, seen = s3.store(), []
    rule = Rule(Fault.REFUSED, "POST", "uploadId", before=lambda: seen.append(store.exists("key")))
    s3.proxy.rules.append(rule)
    store.put("key", noise(2 * PART))
    assert seen == [False] and store.exists("key")


@pytest.mark.parametrize(("method", "target"), [("PUT", "partNumber=2"), ("POST", "uploadId")])
def test_a_large_put_that_fails_is_taken_back(s3: S3, small_parts: None, method: str, target: str):
    s3.proxy.rules.append(Rule(Fault.REFUSED, method, target, times=99))
    with pytest.raises(JobError, match="SlowDown"):
        s3.store(max_attempts=2).put("key", noise(3 * PART))
    assert not s3.store().exists("key")
    assert uploads(s3) == []


def test_parts_that_could_not_be_taken_back_are_told_of(s3: S3, small_parts: None):
    s3.proxy.rules.append(Rule(Fault.REFUSED, "PUT", times=99))
    s3.proxy.rules.append(Rule(Fault.REFUSED, "DELETE", times=99))
    with pytest.raises(JobError, match="cannot write") as caught:
        s3.store(max_attempts=2).put("key", noise(2 * PART))
    assert uploads(s3)[0]["UploadId"] in caught.value.__notes__[0]


@pytest.mark.parametrize(("status", "code"), [(200, ""), (404, "NoSuchUpload"), (412, "PreconditionFailed")])
def test_a_large_put_whose_completion_is_lost_went_through(s3: S3, small_parts: None, status: int, code: str):
    """Servers answer the second completion differently; moto does as if it were the first."""
    s3.proxy.rules.append(Rule(Fault.LOST_ANSWER, "POST", "uploadId"))
    if code:
        s3.proxy.rules.append(Rule(Fault.REFUSED, "POST", "uploadId", status=status, code=code))
    assert s3.store().put_if_absent("key", noise(2 * PART))
    assert s3.store().get("key") == noise(2 * PART)


def test_a_large_put_whose_upload_someone_else_aborted_has_failed(s3: S3, small_parts: None):
    s3.store().put("key", b"of someone else")
    s3.proxy.rules.append(Rule(Fault.REFUSED, "POST", "uploadId", status=404, code="NoSuchUpload"))
    with pytest.raises(JobError, match="was aborted by someone else"):
        s3.store().put("key", noise(2 * PART))


def test_a_large_put_that_is_not_the_first_leaves_no_parts(s3: S3, small_parts: None):
    s3.store().put("key", b"first")
    assert not s3.store().put_if_absent("key", noise(2 * PART))
    assert s3.store().get("key") == b"first"
    assert uploads(s3) == []


def test_a_large_swap_follows_the_etag(s3: S3, small_parts: None):
    store = s3.store()
    store.put("key", noise(2 * PART))
    etag = store.info("key").etag
    assert store.put_if_match("key", noise(2 * PART + 1), etag)
    assert not store.put_if_match("key", b"small", etag)
    assert store.info("key").size_bytes == 2 * PART + 1


# Reading


def test_a_get_that_is_cut_is_done_again(s3: S3):
    s3.store().put("key", noise(100_000))
    s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=2))
    assert s3.store().get("key") == noise(100_000)


def test_bytes_that_changed_on_the_way_are_not_taken(s3: S3):
    s3.store().put("key", b"good")
    s3.proxy.rules.append(Rule(Fault.FLIPPED_ANSWER, "GET", times=2))
    assert s3.store().get("key") == b"good"
    assert len(s3.proxy.sent("GET")) == 3


def test_a_stream_goes_on_where_it_was_cut(s3: S3):
    data = noise(3_000_000)
    s3.store().put("key", data)
    s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=5, after_bytes=300_000))
    s3.proxy.rules.append(Rule(Fault.REFUSED, "GET", times=2))
    with s3.store().open("key") as stream:
        assert stream.read() == data
    # Ranges that were cut are not read from their beginning again.
    starts = [int(each.headers["Range"][6:].partition("-")[0]) for each in s3.proxy.sent("GET")]
    assert starts == sorted(starts)
    assert starts[-1] > 1_000_000


def test_a_stream_gives_up_where_nothing_comes_any_more(s3: S3):
    s3.store().put("key", noise(3_000_000))
    with s3.store(max_attempts=3).open("key") as stream:
        assert len(stream.read(1000)) == 1000
        s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=99, after_bytes=0))
        with pytest.raises(JobError, match=f"cannot read s3://{s3.bucket}/root/key"):
            stream.read()


def test_a_stream_of_an_object_that_is_replaced_breaks_off(s3: S3):
    store = s3.store()
    store.put("key", noise(3_000_000))
    with store.open("key") as stream:
        stream.read(1000)
        store.put("key", noise(3_000_001))
        with pytest.raises(JobError, match="was replaced while it was read"):
            stream.read()


def test_a_stream_is_read_at_any_place(s3: S3):
    data = noise(2_000_000)
    s3.store().put("key", data)
    choose = random.Random(0)
    with s3.store().open("key") as stream:
        assert stream.seek(0, io.SEEK_END) == len(data)
        assert stream.read(1) == b""
        for _ in range(40):
            start, size = choose.randrange(len(data)), choose.choice([1, 1000, 600_000])
            assert stream.seek(start) == start
            assert stream.read(size) == data[start : start + size]
        assert stream.seek(-7, io.SEEK_END) == len(data) - 7
        assert stream.read() == data[-7:]


def test_compressed_lines_and_parquet_are_read_through_faults(s3: S3):
    store = s3.store()
    text = b"\n".join(zlib.compress(str(number).encode()).hex().encode() for number in range(50_000))
    store.put("lines.gz", gzip.compress(text))
    table = pa.table({"number": range(200_000), "text": [str(number * 7919) for number in range(200_000)]})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=20_000)
    store.put("table.parquet", sink.getvalue())
    s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=4, after_bytes=100_000))
    with store.open("lines.gz") as stream, gzip.open(stream) as lines:
        assert lines.read() == text
    s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=4, after_bytes=10_000))
    with store.open("table.parquet") as stream:
        file = pq.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 16)
        assert pa.concat_tables(file.read_row_group(number) for number in range(10)) == table


def test_a_lost_network_is_no_bad_parquet(s3: S3):
    """Readers take OSError for broken data and give error rows for it; a JobError ends the job."""
    store = s3.store(max_attempts=2)
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": [noise(100) for _ in range(50_000)]}), sink, compression="none")
    store.put("table.parquet", sink.getvalue())
    with store.open("table.parquet") as stream:
        file = pq.ParquetFile(stream)
        s3.proxy.rules.append(Rule(Fault.CUT_ANSWER, "GET", times=99, after_bytes=0))
        with pytest.raises(JobError, match="cannot read"):
            file.read()


def test_a_listing_goes_by_pages(s3: S3):
    for number in range(25):
        s3.direct.put_object(Bucket=s3.bucket, Key=f"root/data/part-{number:04d}", Body=b"")
    s3.direct.put_object(Bucket=s3.bucket, Key="root/data/", Body=b"")
    s3.direct.put_object(Bucket=s3.bucket, Key="rooted", Body=b"")
    s3.proxy.page_size = 10
    s3.proxy.rules.append(Rule(Fault.REFUSED, "GET", "continuation-token", times=2))
    assert list(s3.store().keys("data/part-")) == [f"data/part-{number:04d}" for number in range(25)]
    assert len(s3.proxy.sent("GET", "list-type=2")) == 5
    assert len(list(s3.store().keys())) == 25


# What users get wrong


def acts(store: S3Store) -> list:
    return [
        lambda: store.put("key", b""),
        lambda: store.put_if_absent("key", b""),
        lambda: store.get("key"),
        lambda: store.open("key"),
        lambda: list(store.keys()),
    ]


def test_a_bucket_that_is_missing_is_named(s3: S3):
    for act in acts(S3Store("no-such-bucket", "root", s3.settings())):
        with pytest.raises(JobRefused, match="there is no bucket no-such-bucket") as caught:
            act()
        assert not isinstance(caught.value, NotFound)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "access denied"),
        (403, "InvalidAccessKeyId", "the credentials or the region are wrong"),
        (403, "SignatureDoesNotMatch", "the credentials or the region are wrong"),
        (301, "PermanentRedirect", "is in another region; set storage.region"),
    ],
)
def test_what_waiting_does_not_help_is_refused_at_once(s3: S3, status: int, code: str, said: str):
    s3.store().put("key", b"")
    for method in ("PUT", "GET"):
        s3.proxy.rules.append(Rule(Fault.REFUSED, method, times=99, status=status, code=code))
    before = len(s3.proxy.requests)
    for act in (lambda: s3.store().put("key", b""), lambda: s3.store().get("key")):
        with pytest.raises(JobRefused, match=rf"s3://{s3.bucket}/root/key: .*{said}"):
            act()
    asked = [each for each in s3.proxy.requests[before:] if each.method != "HEAD"]
    # To be sent elsewhere, botocore follows once.
    assert len(asked) == (4 if status == 301 else 2)


def test_a_head_that_is_denied_is_no_missing_object(s3: S3):
    s3.proxy.rules.append(Rule(Fault.REFUSED, "HEAD", times=99, status=403))
    with pytest.raises(JobRefused, match="access denied"):
        s3.store().exists("key")


def test_credentials_that_ran_out_end_the_job_so_that_it_can_go_on(s3: S3):
    s3.proxy.rules.append(Rule(Fault.REFUSED, "PUT", status=400, code="ExpiredToken"))
    with pytest.raises(JobError, match="renew them") as caught:
        s3.store().put("key", b"")
    assert caught.value.exit_code == 1


def test_missing_credentials_are_asked_for(s3: S3, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(JobRefused, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        s3.store().get("key")
    with pytest.raises(JobRefused, match="nobody"):
        s3.store(profile="nobody").get("key")
    s3.direct.put_object(Bucket=s3.bucket, Key="root/key", Body=b"public", ACL="public-read")
    assert s3.store(anonymous=True).get("key") == b"public"
    assert "Authorization" not in s3.proxy.requests[-1].headers


def test_an_endpoint_that_does_not_answer_is_named(s3: S3):
    store = S3Store("bucket", "root", s3.settings(endpoint_url="http://127.0.0.1:9", max_attempts=2))
    with pytest.raises(
        JobError, match=r"http://127.0.0.1:9 cannot be reached; check .* storage.endpoint_url"
    ):
        store.put("key", b"")


def test_an_endpoint_that_is_no_address_is_refused(s3: S3):
    with pytest.raises(JobRefused, match=r"storage\.endpoint_url"):
        S3Store("bucket", "root", s3.settings().model_copy(update={"endpoint_url": "nonsense"})).get("key")
