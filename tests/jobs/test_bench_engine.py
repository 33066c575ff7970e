"""The benchmark's arithmetic, and one small run of it."""

from __future__ import annotations

import json

import pytest

from dflash_engine import Result, Usage
from jobs import bench_engine
from tests.helpers import tiny_draft_folder, tiny_model_folder


def result(tokens: tuple[int, ...], steps: int = 0, accepted: int = 0) -> Result:
    usage = Usage(completion_tokens=len(tokens), steps=steps, accepted_tokens=accepted)
    return Result(request_id="x", tokens=tokens, finish_reason="length", usage=usage)


def test_acceptance_is_pooled_over_steps_and_differences_are_counted():
    answers = [result((1, 2, 3, 4), steps=1, accepted=2), result((5, 6, 7), steps=2, accepted=0)]
    expected = [result((1, 2, 3, 4)), result((5, 6, 8))]
    assert bench_engine.figures(answers, 2.0, expected) == {
        "completion_tokens": 7,
        "elapsed_s": 2.0,
        "tokens_per_s": 3.5,
        "acceptance_length": 1.667,  # 1 + 2 accepted in 3 steps
        "equal_answers": 1,
    }


def test_the_variants_take_turns_and_go_first_in_turn():
    calls = []

    def variant(name):
        def run(group):
            calls.append(name)
            return [result((len(calls),)) for _ in group]

        return run

    prompts = [[{"role": "user", "content": str(number)}] for number in range(5)]
    groups = [prompts[:2], prompts[2:4], prompts[4:]]
    measured = bench_engine.measure({"a": variant("a"), "b": variant("b")}, groups)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [answer.tokens for answer in measured["a"][0]] == [(1,), (1,), (4,), (4,), (5,)]


def test_a_run_compares_all_variants_and_ends_with_one_json_line(capsys, tmp_path):
    model = tiny_model_folder(tmp_path, "llama")
    draft = tiny_draft_folder(tmp_path, model)
    prompts = tmp_path / "prompts.jsonl"
    texts = ["Where is my order?", "I would like to return a jacket.", "我的订单在哪里？"]
    prompts.write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts)
    )
    asked = ["--model", model, "--draft", draft, "--dtype", "float32", "--prompts", prompts]
    status = bench_engine.main(
        [str(arg) for arg in [*asked, "--max_tokens", 12, "--batch", "1,2", "--with_transformers"]]
    )
    *table, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    runs = {(run["batch"], run["variant"]): run for run in summary["runs"]}
    assert list(runs) == [(1, "plain"), (1, "dflash"), (1, "transformers"), (2, "plain"), (2, "dflash")]
    assert status == 0 and summary["identical"] and summary["prompts"] == 3
    assert all(run["equal_answers"] == 3 for run in runs.values())
    assert runs[1, "plain"]["acceptance_length"] == 1.0 <= runs[1, "dflash"]["acceptance_length"]
    assert runs[1, "plain"]["times_plain"] == 1.0
    assert {"cpu", "cores", "torch"} <= summary["machine"].keys()
    assert sum(line.split()[1:2] == ["dflash"] for line in table) == 2


@pytest.mark.parametrize("content", ["", "not json\n", '{"prompt": "x"}\n', "[1]\n"])
def test_prompts_of_another_form_end_with_exit_code_2(capsys, tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert bench_engine.main(["--prompts", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--batch", "1,x"], ["--batch", "0"], ["--num_prompts", "0"]])
def test_senseless_sizes_are_refused(capsys, argv):
    with pytest.raises(SystemExit) as refused:
        bench_engine.main(argv)
    assert refused.value.code == 2
    assert argv[1] in capsys.readouterr().err
