"""Responses on disk, cut, split, packed into rows, and drawn from by steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_engine.errors import ConfigError
from dflash_engine.training.corpus import Corpus, corpus_of, load_corpus, save_corpus, split_held_out
from dflash_engine.training.packing import pack
from dflash_engine.training.plans import Planner, anchors_of_all

PAIRS = [([1, 2, 3], [4, 5, 6, 7]), ([8], [9, 10]), ([1, 2, 3], [11, 12, 13]), ([20, 21], [22, 23, 24])]


def random_corpus(num: int, longest: int = 30, seed: int = 0) -> Corpus:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, longest + 1, num)
    prompts = [int(rng.integers(1, length - 1)) for length in lengths]
    texts = [rng.integers(1, 60000, length).tolist() for length in lengths]
    return corpus_of([(text[:cut], text[cut:]) for text, cut in zip(texts, prompts, strict=True)], 65000)


def test_a_corpus_survives_the_disk(tmp_path: Path):
    corpus = corpus_of(PAIRS, 50_000)
    save_corpus(corpus, tmp_path / "a" / "part-0.npz")
    found = load_corpus([str(tmp_path / "a")])
    assert found.digest == corpus.digest and found.tokens.dtype == np.uint16
    assert found.sequence(1).tolist() == [8, 9, 10] and found.prompt(0).tolist() == [1, 2, 3]
    assert found.response_tokens == 12


def test_parquet_of_a_batch_job_is_read_without_its_errors(tmp_path: Path):
    table = pa.table(
        {
            "prompt_token_ids": [[1, 2], [3], None],
            "token_ids": [[70_000, 5], [6, 7], None],
            "status": ["ok", "ok", "error"],
        }
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "part-0.parquet")
    corpus = load_corpus([str(tmp_path)])
    assert [corpus.sequence(i).tolist() for i in range(len(corpus))] == [[1, 2, 70_000, 5], [3, 6, 7]]


def test_parquet_without_token_ids_says_which_setting_writes_them(tmp_path: Path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "part.parquet")
    with pytest.raises(ConfigError, match="output_token_ids"):
        load_corpus([str(tmp_path)])


@pytest.mark.parametrize("paths", [[], ["nowhere"]])
def test_no_data_is_an_error(paths: list[str]):
    with pytest.raises(ConfigError, match=r"data\.paths"):
        load_corpus(paths)


def test_all_responses_to_a_prompt_are_on_one_side():
    corpus = corpus_of(PAIRS, 100)
    for seed in range(8):
        training, held_out = split_held_out(corpus, 1, seed)
        assert not set(map(tuple, map(training.prompt, range(len(training))))) & {tuple(held_out.prompt(0))}
        assert len(held_out) == 1
        # Of several responses the first one is measured on.
        assert held_out.sequence(0).tolist() in [prompt + said for prompt, said in PAIRS[:2] + PAIRS[3:]]


def test_clipping_leaves_out_what_has_no_response_left():
    corpus = corpus_of(PAIRS, 100).clipped(4)
    assert [corpus.sequence(i).tolist() for i in range(len(corpus))] == [[8, 9, 10], [20, 21, 22, 23]]


def test_packed_rows_hold_every_sequence_once_with_its_positions():
    corpus = random_corpus(300)
    rows = pack(corpus, 32, 6, seed=3)
    seen = []
    for row, column, length, prompt, number in rows.sequences:
        part = slice(column, column + length)
        assert rows.tokens[row, part].tolist() == corpus.sequence(number).tolist()
        assert prompt == corpus.prompt_lengths[number]
        assert rows.positions[row, part].tolist() == list(range(length))
        assert set(rows.firsts[row, part]) == {column}
        expected = [0] * prompt + [min(length - 1 - at, 5) for at in range(prompt, length)]
        assert rows.labels[row, part].tolist() == expected
        seen.append(number)
    assert sorted(seen) == list(range(300))
    assert rows.num_rows * 32 < 1.1 * len(corpus.tokens)
    # Behind the last sequence nothing may begin.
    assert int((rows.labels > 0).sum()) == corpus.response_tokens - len(corpus)


def test_parts_of_packed_rows_keep_their_sequences():
    rows = pack(random_corpus(60), 32, 6, seed=0)
    part = rows.part(np.array([4, 1]))
    for row, column, length, _, _ in part.sequences:
        assert (part.firsts[row, column : column + length] == column).all()
    assert {row for row, *_ in part.sequences} == {0, 1}
    assert np.array_equal(part.tokens[1], rows.tokens[1])


def test_plans_follow_from_seed_and_step_alone_and_visit_each_row_once_an_epoch():
    rows = pack(random_corpus(200), 32, 6, seed=0)
    one, other = (Planner(rows.labels, 4, 9, (7,)) for _ in range(2))
    steps = rows.num_rows // 4
    plans = list(one.plans(0, steps))
    assert len(np.unique(np.concatenate([plan.rows for plan in plans]))) == 4 * steps
    for step in (5, 2):
        again = next(other.plans(step, step + 1))
        assert np.array_equal(again.rows, plans[step].rows)
        assert np.array_equal(again.anchors, plans[step].anchors)
    assert not np.array_equal(Planner(rows.labels, 4, 9, (8,)).plan(0).rows, plans[0].rows)


def test_anchors_are_different_places_where_blocks_may_begin():
    rows = pack(random_corpus(200), 32, 6, seed=0)
    for plan in Planner(rows.labels, 4, 9, (0,)).plans(0, 10):
        for row, anchors in zip(plan.rows, plan.anchors, strict=True):
            assert all(left < right for left, right in pairwise(anchors))
            able = int((rows.labels[row] > 0).sum())
            assert int((rows.labels[row, anchors] > 0).sum()) == min(able, 9)


def test_all_anchors_are_visited_once_to_measure():
    rows = pack(random_corpus(50), 32, 6, seed=0)
    seen = np.zeros_like(rows.labels)
    for plan, counts in anchors_of_all(rows.labels, 4, 5):
        places = np.broadcast_to(plan.rows[:, None], counts.shape)[counts]
        np.add.at(seen, (places, plan.anchors[counts]), 1)
    assert np.array_equal(seen, rows.labels > 0)
