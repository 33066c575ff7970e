"""Where an answer ends, token by token."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from typing import Any

import pytest

from dflash_engine.request import FinishReason, SamplingParams
from dflash_engine.stops import Accepted, StopWatcher

EOS = 0
BYTE = 1000
"""Token BYTE + n stands for the single byte n, so that characters can be split between tokens."""


class Pieces:
    """A detokeniser over a list of pieces: token n is text n; incomplete bytes are held back."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        raw = bytes([token - BYTE]) if token >= BYTE else self._pieces[token].encode()
        return self._decoder.decode(raw)

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join(self.push(token) for token in tokens)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def watcher(*pieces: str, max_tokens: int = 100, **sampling: object) -> StopWatcher:
    """Token 0 is the end of the text, token n is the n-th piece."""
    return StopWatcher(Pieces("<eos>", *pieces), SamplingParams(**sampling), [EOS], max_tokens)


def test_text_flows_while_nothing_stops() -> None:
    stops = watcher("ab", "cd")
    assert stops.accept([1, 2]) == Accepted(2, "abcd")
    assert stops.accept([]) == Accepted(0, "")
    assert stops.accept([1]) == Accepted(1, "ab")


def test_the_end_token_is_kept_without_text_and_cuts_the_block() -> None:
    assert watcher("ab").accept([1, EOS, 1, 1]) == Accepted(2, "ab", "stop")


def test_the_end_token_is_text_where_it_is_ignored() -> None:
    assert watcher("ab", ignore_eos=True).accept([1, EOS, 1]) == Accepted(3, "ab<eos>ab")


def test_named_stop_tokens_stop_also_where_the_end_token_is_ignored() -> None:
    stops = watcher("ab", "cd", ignore_eos=True, stop_token_ids=[2])
    assert stops.accept([EOS, 1, 2, 1]) == Accepted(3, "<eos>ab", "stop")


def test_max_tokens_ends_with_length_and_drops_the_rest_of_the_block() -> None:
    stops = watcher("ab", "cd", max_tokens=3)
    assert stops.accept([1]) == Accepted(1, "ab")
    assert stops.accept([2, 1, 2, 2]) == Accepted(2, "cdab", "length")


@pytest.mark.parametrize("block", [[1, EOS], [1, 2]])
def test_a_stop_on_the_last_allowed_token_is_a_stop(block: list[int]) -> None:
    assert watcher("ab", "END", max_tokens=2, stop="END").accept(block) == Accepted(2, "ab", "stop")


def test_a_stop_behind_max_tokens_is_not_seen() -> None:
    assert watcher("ab", max_tokens=1).accept([1, EOS]) == Accepted(1, "ab", "length")


def test_text_after_a_stop_string_in_the_same_token_is_cut() -> None:
    assert watcher("ab\nQ: x", stop="\nQ:").accept([1, 1]) == Accepted(1, "ab", "stop")


def test_a_stop_string_across_tokens_and_blocks_is_never_shown() -> None:
    stops = watcher("hello E", "N", "D!", stop="END")
    assert stops.accept([1]) == Accepted(1, "hello ")
    assert stops.accept([2]) == Accepted(1, "")
    assert stops.accept([3, 1]) == Accepted(1, "", "stop")


def matched(stops: StopWatcher, *blocks: list[int]) -> str | int | None:
    for block in blocks:
        assert stops.matched is None
        stops.accept(block)
    return stops.matched


def test_what_ended_the_answer_is_named() -> None:
    assert matched(watcher("ab"), [1], [1, EOS]) == EOS
    assert matched(watcher("ab", "cd", stop_token_ids=[2]), [1, 2]) == 2
    assert matched(watcher("ab", "N", "D!", stop=["x", "bND"]), [1], [2, 3]) == "bND"
    assert matched(watcher("ab", max_tokens=1, stop="b"), [1]) == "b"
    assert matched(watcher("ab", max_tokens=1), [1]) is None
    assert matched(watcher("ab END", stop="END"), [1, EOS]) == "END"
    assert matched(watcher("abc", stop=["c", "bc", "b"]), [1]) == "b"


def test_text_that_turns_out_to_be_no_stop_is_shown_late() -> None:
    stops = watcher("a E", "N", "E", "x", stop="END")
    assert stops.accept([1, 2]) == Accepted(2, "a ")
    assert stops.accept([3]) == Accepted(1, "EN")  # the new E may begin a stop again
    assert stops.accept([4]) == Accepted(1, "Ex")


@pytest.mark.parametrize(
    ("end", "kept", "finish"), [([EOS], 1, "stop"), ([2], 1, "length")], ids=["eos", "max_tokens"]
)
def test_held_text_is_released_at_the_end(end: list[int], kept: int, finish: FinishReason) -> None:
    stops = watcher("a E", "N", max_tokens=2, stop="END")
    assert stops.accept([1]) == Accepted(1, "a ")
    assert stops.accept(end) == Accepted(kept, "E" if finish == "stop" else "EN", finish)


def test_of_two_stops_completed_by_one_token_the_earlier_in_the_text_wins() -> None:
    assert watcher("xxabcd", stop=["cd", "abc"]).accept([1]) == Accepted(1, "xx", "stop")


def test_of_overlapping_stops_the_one_completed_first_wins() -> None:
    stops = watcher("xa", "b", "c", "d", stop=["abcd", "bc"])
    assert stops.accept([1, 2]) == Accepted(2, "x")
    assert stops.accept([3, 4]) == Accepted(1, "a", "stop")


def test_a_stop_string_that_repeats_its_own_beginning_is_found() -> None:
    stops = watcher("a", "b", stop="aab")
    assert stops.accept([1, 1, 1]) == Accepted(3, "a")
    assert stops.accept([2]) == Accepted(1, "", "stop")


@pytest.mark.parametrize(("piece", "shown"), [("aaa", "aa"), ("aab", "aab"), ("a:a:", "a:"), (":::", ":::")])
def test_no_more_is_held_back_than_could_begin_a_stop_string(piece: str, shown: str) -> None:
    assert watcher(piece, stop="a::b").accept([1]) == Accepted(1, shown)


def test_a_stop_string_inside_characters_of_many_bytes_is_found_where_it_is_whole() -> None:
    raw = [BYTE + byte for byte in "好。🙂".encode()]
    stops = watcher(stop="。")
    assert stops.accept(raw[:5]) == Accepted(5, "好")
    assert stops.accept(raw[5:]) == Accepted(1, "", "stop")


def test_half_a_character_is_released_only_at_the_end() -> None:
    half = [BYTE + byte for byte in "🙂".encode()[:2]]
    stops = watcher("ab", max_tokens=9)
    assert stops.accept([1, *half]) == Accepted(3, "ab")
    assert stops.accept([EOS]) == Accepted(1, "\ufffd", "stop")


def test_a_stop_string_that_only_the_flush_completes_still_stops() -> None:
    stops = watcher("ab", max_tokens=2, stop="b\ufffd")
    assert stops.accept([1, BYTE + 0xF0]) == Accepted(2, "a", "stop")


def test_a_token_is_text_whatever_its_id_is_used_for_elsewhere() -> None:
    mask_id = 2
    stops = watcher("ab", "|mask|")
    assert stops.accept([1, mask_id, mask_id, 1]) == Accepted(4, "ab|mask||mask|ab")


def test_nothing_is_accepted_after_the_end() -> None:
    stops = watcher("ab")
    stops.accept([EOS])
    with pytest.raises(AssertionError, match="has ended"):
        stops.accept([1])


def test_an_answer_ended_from_outside_gives_out_what_was_held_back() -> None:
    half = [BYTE + byte for byte in "🙂".encode()[:2]]
    stops = watcher("ab EN", stop="END")
    assert stops.accept([1, *half]) == Accepted(3, "ab ")
    assert stops.flush() == "EN\ufffd"
    assert stops.flush() == ""
    with pytest.raises(AssertionError, match="has ended"):
        stops.accept([1])


def test_what_an_answer_ended_from_outside_gives_out_stops_before_a_stop_string() -> None:
    stops = watcher("ab", stop="b\ufffd")
    assert stops.accept([1, BYTE + 0xF0]) == Accepted(2, "a")
    assert stops.flush() == ""


@pytest.mark.parametrize("end", [{"max_tokens": 1}, {"stop": "b"}, {"stop_token_ids": [1]}])
def test_nothing_is_left_to_give_out_after_an_end(end: dict[str, Any]) -> None:
    stops = watcher("ab", **end)
    assert stops.accept([1, BYTE + 0xF0]).finish is not None
    assert stops.flush() == ""


def expected(
    pieces: list[str], tokens: list[int], stops: list[str], limit: int
) -> tuple[int, str, str | None]:
    """The same law over the whole text at once: after each token, look for any stop in all of it."""
    text = ""
    for kept, token in enumerate(tokens, start=1):
        if token == EOS:
            return kept, text, "stop"
        text += pieces[token - 1]
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return kept, text[: min(found)], "stop"
        if kept == limit:
            return kept, text, "length"
    return len(tokens), text, None


@pytest.mark.parametrize("seed", range(200))
def test_the_answer_does_not_depend_on_how_tokens_come_in_blocks(seed: int) -> None:
    rng = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(rng.choice("aab好") for _ in range(rng.randint(1, longest)))

    pieces = [word(3) for _ in range(5)]
    stops = [word(4) + rng.choice("ab") for _ in range(rng.randint(0, 3))]
    limit = rng.randint(1, 30)
    tokens = [rng.choice([EOS, *[1, 2, 3, 4, 5] * 4]) for _ in range(30)]
    kept, text, finish = expected(pieces, tokens, stops, limit)

    stream = watcher(*pieces, max_tokens=limit, stop=stops)
    shown, position, last = "", 0, Accepted(0, "")
    while position < len(tokens) and last.finish is None:
        block = tokens[position : position + rng.randint(1, 8)]
        last = stream.accept(block)
        position += last.kept
        shown += last.text
        assert text.startswith(shown)
        assert last.finish or last.kept == len(block)
    assert (position, last.finish) == (kept, finish)
    assert shown == text if finish else text.startswith(shown)
    assert shown + stream.flush() == text


@pytest.mark.parametrize("seed", range(100))
def test_blocks_that_split_characters_give_what_single_tokens_give(seed: int) -> None:
    rng = random.Random(seed)
    raw = [BYTE + byte for byte in "a好b🙂。".encode()]
    tokens = [token for _ in range(8) for token in rng.choice([raw, [1], [2], raw[1:3], raw[5:7], [EOS]])]
    limit = rng.randint(len(tokens) // 2, len(tokens) + 2)
    stops = rng.sample(["b🙂", "🙂。a", "好b", "xy", "\ufffd\ufffdx", "。aa好"], rng.randint(0, 3))

    def run(longest: int) -> tuple[int, str, str | None]:
        stream = watcher("x", "ya", max_tokens=limit, stop=stops)
        shown, position, last = "", 0, Accepted(0, "")
        while position < len(tokens) and last.finish is None:
            last = stream.accept(tokens[position : position + rng.randint(1, longest)])
            position += last.kept
            shown += last.text
        return position, shown + stream.flush(), last.finish

    alone = run(1)
    assert run(3) == run(len(tokens)) == alone
