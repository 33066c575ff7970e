"""The benchmark of the engine: its arithmetic on made-up contenders, and small runs on tiny models."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

from dflash_engine.benchmarking import (
    Counts,
    Piece,
    Prompt,
    Run,
    StallPlan,
    Timed,
    Variant,
    figures,
    percentile,
    run,
    stall,
)
from dflash_engine.comparison import Workload, compare, stalls
from dflash_engine.contenders import BenchSettings, variants_of
from dflash_engine.errors import ConfigError
from jobs import bench_engine
from tests.dflash_engine.tiny_shapes import write_shapes
from tests.helpers import tiny_draft_folder, tiny_model_folder

PROMPTS = [(number,) for number in range(5)]


class Counter:
    """Answers each request with its own number, `width` tokens a step, and keeps what happened."""

    memory = None

    def __init__(self, log: list[str] | None = None, name: str = "", width: int = 1, wrong: int = -1) -> None:
        self.counts = Counts()
        self.most = 0
        self._log = [] if log is None else log
        self._name, self._width, self._wrong = name, width, wrong
        self._running: dict[Hashable, tuple[int, int]] = {}
        self._keys = itertools.count()

    def submit(self, prompt: Prompt, max_tokens: int) -> Hashable:
        key = next(self._keys)
        self._running[key] = (prompt[0], max_tokens)
        self.most = max(self.most, len(self._running))
        return key

    def step(self) -> list[Piece]:
        pieces = []
        self._log.append(self._name)
        for key, (number, left) in list(self._running.items()):
            num = min(self._width, left)
            said = 99 if number == self._wrong else number
            pieces.append(Piece(key, (said,) * num, left == num, time.perf_counter()))
            self._running[key] = (number, left - num)
            if left == num:
                del self._running[key]
            self.counts = Counts(self.counts.steps + 1, 0, self.counts.accepted + num - 1)
        return pieces

    def abort(self, keys: Sequence[Hashable]) -> None:
        self._running.clear()

    def close(self) -> None:
        self._log.append(f"{self._name} closed")


def variant(name: str, log: list[str], **changes: int) -> Variant:
    return Variant(name, lambda share: Counter(log, name, **changes), exact=name in ("plain", "dflash"))


def told(*variants: Variant, together: bool = True, concurrency: tuple[int, ...] = (1, 2)):
    return compare(variants, Workload(PROMPTS, 2, concurrency), 0.9, together=together)


def test_so_many_are_in_flight_until_the_prompts_run_out_and_answers_keep_their_order():
    contender = Counter()
    measured = run(contender, PROMPTS, 3, 2)
    assert contender.most == 2
    assert [answer.tokens for answer in measured.answers] == [(number,) * 3 for number in range(5)]
    assert all(each.submitted_s <= each.first_s <= each.last_s for each in measured.answers)
    assert measured.counts == Counts(15, 0, 0)
    assert run(contender, PROMPTS[:1], 3, 2).counts == Counts(3, 0, 0)


def test_figures_are_those_of_arithmetic_by_hand():
    answers = (
        Timed((1,) * 5, 10.0, 10.5, 12.5),
        Timed((2,) * 3, 11.0, 11.1, 14.0),
        Timed((3,), 11.0, 11.9, 11.9),
    )
    assert figures(Run(answers, Counts(steps=4, drafted=10, accepted=3))) == {
        "completion_tokens": 9,
        "elapsed_s": 4.0,
        "tokens_per_s": 2.25,
        "ttft_s": 0.5,
        "ttft_p95_s": pytest.approx(0.9),
        "time_per_token_s": pytest.approx((2.0 / 4 + 2.9 / 2) / 2),
        "acceptance_length": 1.75,  # 4 tokens of the target and 3 accepted ones in 4 steps
        "drafted_per_step": 2.5,
    }


def test_a_percentile_is_a_value_that_was_measured():
    assert percentile(range(100), 0.95) == 94
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([2.0, 1.0], 0.5) == 1.0


def test_contenders_take_turns_and_go_first_in_turn():
    log: list[str] = []
    told(variant("plain", log), variant("other", log))
    order = [name for name, _ in itertools.groupby(log)]
    # Warm-ups in the order of the list; who begins the measured runs changes.
    assert order[:4] == ["plain", "other", "plain", "other"]
    assert order[4:] == ["plain", "other", "plain", "plain closed", "other closed"]


def test_a_whole_warm_up_answers_everything_twice_before_it_counts():
    contenders: list[Counter] = []

    def made(utilization: float) -> Counter:
        contenders.append(Counter())
        return contenders[0]

    for whole, num in ((False, 2 + 5), (True, 2 * 5 + 5)):
        contenders.clear()
        compare([Variant("plain", made)], Workload(PROMPTS, 3, (2,), whole_warm_up=whole), 0.9, together=True)
        assert contenders[0].counts.steps == 3 * num


def test_one_after_the_other_each_is_closed_before_the_next_is_built():
    log: list[str] = []
    result = told(variant("plain", log), variant("other", log), together=False)
    assert [name for name, _ in itertools.groupby(log)] == ["plain", "plain closed", "other", "other closed"]
    lines = [(line["concurrency"], line["variant"]) for line in result.lines]
    assert lines == [(1, "plain"), (1, "other"), (2, "plain"), (2, "other")]


def test_shares_of_memory_add_up_for_those_built_together_and_who_comes_alone_has_all_of_it():
    shares: dict[str, float] = {}

    def kept(name: str, *, alone: bool = False) -> Variant:
        def make(utilization: float) -> Counter:
            shares[name] = round(utilization, 9)
            return Counter()

        return Variant(name, make, alone=alone)

    told(kept("plain"), kept("dflash"), kept("vllm", alone=True))
    assert shares == {"plain": 0.45, "dflash": 0.9, "vllm": 0.9}


def test_who_bears_no_other_beside_it_is_built_when_the_others_are_closed():
    log: list[str] = []
    foreign = Variant("vllm", lambda share: Counter(log, "vllm"), alone=True)
    result = told(variant("plain", log), foreign, variant("dflash", log), concurrency=(1,))
    closed = [log.index(f"{name} closed") for name in ("plain", "dflash")]
    assert max(closed) < log.index("vllm")
    assert [line["variant"] for line in result.lines] == ["plain", "vllm", "dflash"]


def test_answers_are_compared_with_plain_decoding_and_only_exact_variants_must_agree():
    log: list[str] = []
    assert told(variant("plain", log), variant("dflash", log, width=2)).identical
    other = told(variant("plain", log), variant("vllm", log, wrong=3))
    assert other.identical
    assert [line["equal_answers"] for line in other.lines] == [5, 4, 5, 4]
    assert not told(variant("plain", log), variant("dflash", log, wrong=3)).identical


def test_who_can_take_one_at_a_time_is_measured_at_one():
    single = Variant("single", lambda share: Counter(), most_at_once=1)
    lines = told(variant("plain", []), single).lines
    assert [line["concurrency"] for line in lines if line["variant"] == "single"] == [1]


class Stalling(Counter):
    """Its clock shows 1 s a step; the prompt (7,) takes three steps' time at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def step(self) -> list[Piece]:
        arrived = any(number == 7 for number, _ in self._running.values())
        self._now += 3.0 if arrived else 1.0
        return [piece._replace(at_s=self._now) for piece in super().step()]


def test_a_stall_is_the_longest_gap_over_the_usual_one():
    result = stall(Stalling(), [(1,), (2,)], (7,), StallPlan(6, 100))
    assert (result["usual_gap_s"], result["longest_gap_s"], result["times_usual"]) == (1.0, 3.0, 3.0)


def test_streams_that_end_too_early_make_no_measurement():
    with pytest.raises(ConfigError, match="ended after 3 tokens"):
        stall(Stalling(), [(1,), (2,)], (7,), StallPlan(6, 3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return tiny_draft_folder(tmp_path_factory.mktemp("drafts"), model)


def bench(capsys: pytest.CaptureFixture[str], *asked: object) -> tuple[int, list[str], dict]:
    status = bench_engine.main([str(each) for each in ("--device", "cpu", *asked)])
    *printed, last = capsys.readouterr().out.splitlines()
    return status, printed, json.loads(last)


def test_a_run_compares_all_variants_and_ends_with_one_json_line(capsys, tmp_path, model, draft):
    texts = ["Where is my order?", "I would like to return a jacket.", "我的订单在哪里？"]
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    path.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts)
    )
    asked = ("--model", model, "--draft", draft, "--dtype", "float32", "--dataset", path, "--json", out)
    status, printed, summary = bench(
        capsys,
        *asked,
        "--max_tokens",
        12,
        "--concurrency",
        "1,2",
        "--with",
        "transformers",
        "--set",
        "threads=1",
    )
    runs = {(each["concurrency"], each["variant"]): each for each in summary["runs"]}
    assert list(runs) == [(1, "plain"), (1, "dflash"), (1, "transformers"), (2, "plain"), (2, "dflash")]
    assert status == 0 and summary["identical"] and summary["together"]
    assert all(each["equal_answers"] == each["prompts"] == 3 for each in runs.values())
    assert runs[1, "plain"]["acceptance_length"] == 1.0 <= runs[1, "dflash"]["acceptance_length"]
    assert runs[1, "dflash"]["drafted_per_step"] > 1
    assert runs[1, "transformers"]["ttft_s"] < runs[1, "transformers"]["elapsed_s"]
    assert summary["memory"]["plain"]["kv_tokens_lost"] == 0 < summary["memory"]["dflash"]["kv_tokens_lost"]
    assert {"cpu", "cores", "torch"} <= summary["machine"].keys()
    assert sum(line.split()[1:2] == ["dflash"] for line in printed) == 2
    assert json.loads(out.read_text()) == summary


def test_random_prompts_and_weights_need_no_tokenizer(capsys, tmp_path):
    asked = (
        "--model",
        write_shapes(tmp_path),
        "--weights",
        "random",
        "--draft",
        "none",
        "--prompt_tokens",
        9,
    )
    status, _, summary = bench(capsys, *asked, "--max_tokens", 4, "--num_prompts", 3, "--concurrency", 2)
    assert status == 0
    assert [each["completion_tokens"] for each in summary["runs"]] == [3 * 4]


def test_ttft_compares_long_prompts_one_at_a_time(capsys, model, draft):
    asked = ("--model", model, "--draft", draft, "--ttft", "--prompt_tokens", 40, "--num_prompts", 2)
    status, _, summary = bench(capsys, *asked)
    assert status == 0 and summary["ttft_times_plain"] > 0
    assert {(each["concurrency"], each["completion_tokens"]) for each in summary["runs"]} == {(1, 32)}


def test_a_stall_counts_in_the_third_run_where_graphs_are_captured_in_the_second():
    made: list[Stalling] = []

    class Counted(Stalling):
        def submit(self, prompt, max_tokens):
            submitted.append(prompt)
            return super().submit(prompt, max_tokens)

    submitted: list[tuple[int, ...]] = []

    def make(utilization: float) -> Stalling:
        made.append(Counted())
        return made[0]

    stalls([Variant("plain", make)], [(1,), (2,)], (7,), 0.9)
    assert len(made) == 1 and submitted.count((7,)) == 3


def test_stall_tells_every_variants_longest_gap(capsys, model, draft):
    asked = ("--model", model, "--draft", draft, "--stall", "--prompt_tokens", 100)
    status, printed, summary = bench(capsys, *asked)
    assert status == 0 and summary["long_prompt_tokens"] == 100
    assert list(summary["stall"]) == ["plain", "dflash"]
    assert all(each["longest_gap_s"] > 0 < each["usual_gap_s"] for each in summary["stall"].values())
    assert len(printed) == 3


def test_the_exit_code_is_1_where_answers_differ(capsys, monkeypatch, model, draft):
    def differing(settings):
        return [variant("plain", []), variant("dflash", [], wrong=3)]

    monkeypatch.setattr(bench_engine, "variants_of", differing)
    monkeypatch.setattr(bench_engine, "random_prompts", lambda *_, **__: PROMPTS)
    status, _, summary = bench(capsys, "--model", model, "--draft", draft, "--prompt_tokens", 1)
    assert (status, summary["identical"]) == (1, False)


@pytest.mark.parametrize("content", ["", "not json\n", '{"prompt": "x"}\n', "[1]\n"])
def test_prompts_of_another_form_end_with_exit_code_2(capsys, tmp_path, model, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert bench_engine.main(["--model", str(model), "--draft", "none", "--dataset", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_model_without_a_known_draft_says_how_to_go_on(capsys, model):
    assert bench_engine.main(["--model", str(model), "--prompt_tokens", "4"]) == 2
    assert "--draft none" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--acceptance", "--with"])
def test_what_random_weights_cannot_give_is_refused_before_they_are_made(
    capsys, tmp_path, monkeypatch, other
):
    monkeypatch.setattr("dflash_engine.contenders.EngineContender", lambda *_, **__: pytest.fail("loaded"))
    asked = ["--model", str(write_shapes(tmp_path)), "--weights", "random", "--device", "cpu"]
    assert bench_engine.main([*asked, other, "2" if other == "--acceptance" else "transformers"]) == 2
    assert other in capsys.readouterr().err


def test_vllm_that_is_not_installed_is_named(capsys, model):
    asked = ["--model", str(model), "--draft", "none", "--prompt_tokens", "4", "--with", "vllm"]
    assert bench_engine.main(asked) == 2
    assert "vllm cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--concurrency", "1,x"],
        ["--concurrency", "0"],
        ["--num_prompts", "0"],
        ["--with", "magic"],
        ["--acceptance", "4"],
        ["--dataset", "x.jsonl", "--prompt_tokens", "4"],
        ["--set", "threads"],
        ["--ttft", "--stall"],
    ],
)
def test_senseless_arguments_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as refused:
        bench_engine.main(argv)
    assert refused.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_vllm_bears_no_other_engine_beside_it_and_ours_do(model):
    settings = BenchSettings(model=str(model), draft=None, others=("vllm",))
    assert {each.name: each.alone for each in variants_of(settings)} == {"plain": False, "vllm": True}
