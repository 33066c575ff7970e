"""What rounds cost: buckets, corrections while running, and the file between two starts."""

from __future__ import annotations

import json
import logging

import pytest

from dflash_engine.step_times import StepTimes, TimesKey

KEY = TimesKey("sha256:1", "H200", "0.1")


def make_times(**changes) -> StepTimes:
    tables = {
        "verify_s": {8: 0.004, 16: 0.005, 32: 0.006},
        "draft_s": {1: 0.001, 4: 0.002},
        "context_s": {32: 0.0005},
    }
    return StepTimes(**(tables | changes))


def test_a_size_costs_what_the_next_bucket_costs():
    times = make_times()
    assert [times.verify(size) for size in (1, 8, 9, 16, 32)] == [0.004, 0.004, 0.005, 0.005, 0.006]
    assert (times.draft(3), times.context(7)) == (0.002, 0.0005)


def test_nothing_costs_nothing():
    times = make_times()
    assert times.verify(0) == times.draft(0) == times.context(0) == 0


def test_beyond_the_largest_bucket_the_last_line_goes_on():
    times = make_times()
    assert times.verify(64) == pytest.approx(0.006 + 32 * 0.001 / 16)
    assert times.context(64) == pytest.approx(0.001)
    assert make_times(verify_s={8: 0.002, 16: 0.001}).verify(99) == 0.001


def test_the_floor_grows_with_the_rows_of_the_host():
    assert make_times(host_s=0.001, host_row_s=0.0001).floor(10) == pytest.approx(0.002)


@pytest.mark.parametrize("table", [{}, {0: 1.0}, {1: 0.0}, {1: float("nan")}, {1: float("inf")}])
def test_a_table_that_cannot_be_is_refused(table):
    with pytest.raises(ValueError, match="sizes >= 1 to seconds > 0"):
        make_times(verify_s=table)


def test_a_host_floor_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="host_s"):
        make_times(host_s=-1.0)


def test_observations_correct_their_bucket_and_those_never_seen():
    times = make_times()
    for _ in range(10):
        times.observe("verify", 12, 0.010)
    assert [times.verify(size) for size in (8, 16, 32)] == pytest.approx([0.008, 0.010, 0.012], rel=0.01)
    assert times.draft(4) == 0.002


def test_a_bucket_seen_itself_is_not_taken_for_its_neighbour():
    times = make_times()
    for _ in range(100):
        times.observe("verify", 8, 0.008)
        times.observe("verify", 16, 0.005)
    assert [times.verify(8), times.verify(16)] == pytest.approx([0.008, 0.005], rel=0.03)


def test_one_hiccup_moves_a_known_bucket_by_less_than_a_tenth():
    times = make_times()
    for _ in range(20):
        times.observe("verify", 8, 0.004)
    times.observe("verify", 8, 4.0)
    assert 0.004 < times.verify(8) < 0.0044


def test_a_hiccup_in_a_bucket_that_is_then_left_alone_is_forgotten():
    times = make_times()
    times.observe("verify", 16, 0.01)
    for _ in range(1000):
        times.observe("verify", 8, 0.004)
    assert times.verify(16) == pytest.approx(0.005, rel=0.05)


def test_times_that_cannot_be_are_ignored():
    times = make_times()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        times.observe("verify", 8, seconds)
    times.observe("verify", 0, 1.0)
    assert times.verify(8) == 0.004


def test_a_whole_round_is_soon_predicted_though_only_its_total_was_timed():
    times = make_times()
    for _ in range(30):
        times.observe_round(16, num_rows=4, num_drafting=4, with_context=True, seconds=0.012)
        times.observe_round(8, num_rows=8, num_drafting=0, with_context=False, seconds=0.004)
    assert times.verify(16) + times.draft(4) + times.context(16) == pytest.approx(0.012, rel=0.02)
    assert times.verify(8) == pytest.approx(0.004, rel=0.02)


def test_rounds_that_waited_for_the_host_say_nothing_about_the_passes():
    times = make_times(host_s=0.02)
    for seconds in (0.001, 0.02, 0.022):
        times.observe_round(8, num_rows=8, num_drafting=0, with_context=False, seconds=seconds)
    assert times.verify(8) == 0.004
    times.observe_round(8, num_rows=8, num_drafting=0, with_context=False, seconds=0.1)
    assert times.verify(8) > 0.004


def test_what_was_saved_is_loaded_as_it_was_measured(tmp_path):
    times, path = make_times(host_s=0.001, host_row_s=1e-5), tmp_path / "new" / "times.json"
    times.observe("verify", 8, 0.008)
    times.save(path, KEY)
    loaded = StepTimes.load(path, KEY)
    assert (loaded.verify(8), loaded.draft(4), loaded.context(1), loaded.floor(1)) == (
        0.004,
        0.002,
        0.0005,
        0.001 + 1e-5,
    )
    assert [file.name for file in path.parent.iterdir()] == ["times.json"]


def test_a_file_that_is_not_there_is_no_warning(tmp_path, caplog):
    assert StepTimes.load(tmp_path / "times.json", KEY) is None
    assert not caplog.records


@pytest.mark.parametrize("key", [TimesKey("2", "H200", "0.1"), TimesKey("sha256:1", "H100", "0.1")])
def test_times_of_another_model_or_gpu_are_ignored_with_a_warning(tmp_path, caplog, key):
    make_times().save(tmp_path / "times.json", key)
    assert StepTimes.load(tmp_path / "times.json", KEY) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\x00\xff",
        lambda text: json.dumps(json.loads(text) | {"verify_s": {"8": -1}}),
        lambda text: json.dumps(json.loads(text) | {"verify_s": [1]}),
        lambda text: json.dumps(json.loads(text) | {"host_s": None}),
        lambda text: json.dumps({"key": json.loads(text)["key"]}),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning_and_can_be_rewritten(tmp_path, caplog, damage):
    path = tmp_path / "times.json"
    make_times().save(path, KEY)
    path.write_text(damage(path.read_text()), encoding="latin-1")
    assert StepTimes.load(path, KEY) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    make_times().save(path, KEY)
    assert StepTimes.load(path, KEY).verify(1) == 0.004


def test_where_a_file_cannot_be_written_a_warning_says_so_and_nothing_is_left(tmp_path, caplog):
    (tmp_path / "times.json").mkdir()
    make_times().save(tmp_path / "times.json", KEY)
    assert "cannot be kept" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == ["times.json"]
