"""Prompts of evaluation sets are found in training data, and instructions that everyone shares are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_engine.request import Message
from dflash_engine.tokenizer import Tokenizer
from dflash_engine.training.checks import TrainingCheckFailed
from dflash_engine.training.config import TrainConfig
from dflash_engine.training.contamination import Apart, contaminated, normal_words
from dflash_engine.training.corpus import corpus_of, save_corpus
from dflash_engine.training.preparation import prepare
from tests.dflash_engine.training.tiny_run import CPU, config_for, target_folder
from tests.helpers import byte_level_tokenizer

EVALUATION = [
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast and bakes muffins with four of them.",
    "Answer in one sentence, please, as if you were speaking to a child of five years: what is rain?",
    "Answer in one sentence, please, as if you were speaking to a child of five years: what is snow?",
    "Answer in one sentence, please, as if you were speaking to a child of five years: what is wind?",
    "我的订单在三天前已经发货可是到现在还没有收到请你帮我查一下",
]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    file = tmp_path / "evaluation.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in EVALUATION]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return [file]


@pytest.mark.parametrize(
    ("text", "repeats"),
    [
        (EVALUATION[0].upper().replace(",", " ;"), True),
        (f"Here is a riddle. {EVALUATION[0]} How many are left?", True),
        ("She eats three for breakfast, and nothing else.", False),
        (EVALUATION[1].replace("what is rain", "what is hail"), False),
        (EVALUATION[1], True),
        (f"你好，{EVALUATION[4]}，谢谢", True),
        ("我的订单在哪里", False),
        ("Where is my order?", False),
    ],
)
def test_repeated_prompts_and_long_parts_of_them_are_found(files: list[Path], text: str, repeats: bool):
    assert Apart(files).repeats(text) is repeats


def test_words_are_normalised():
    assert normal_words("Ｊanet’s DUCKS, 16\neggs; 鸭蛋!") == [
        "janet",
        "s",
        "ducks",
        "16",
        "eggs",
        "鸭",
        "蛋",
    ]


def test_the_chat_template_is_no_part_of_a_prompt(files: list[Path], tmp_path: Path):
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer.load(tmp_path / "model")
    prompts = [
        tokenizer.encode_chat([Message("user", text)])
        for text in ("Where is it?", EVALUATION[0], "Who are you?", EVALUATION[0])
    ]
    corpus = corpus_of([(prompt, [5, 6]) for prompt in prompts], 320)
    assert contaminated(corpus, tokenizer, files).tolist() == [1, 3]


def test_a_run_may_refuse_such_data(tmp_path: Path):
    target = target_folder(tmp_path)
    tokenizer = Tokenizer.load(target)
    texts = [f"Where is order {number}, that I sent on Monday?" for number in range(30)]
    pairs = [(tokenizer.encode_chat([Message("user", text)]), [5, 6, 7]) for text in texts]
    save_corpus(corpus_of(pairs, 320), tmp_path / "data" / "part-0.npz")
    kept_apart = tmp_path / "apart.jsonl"
    kept_apart.write_text(json.dumps({"messages": [{"role": "user", "content": texts[3]}]}))
    checks = {"keep_apart": [str(kept_apart)], "min_response_tokens": 1}
    data = {"paths": [str(tmp_path / "data")], "row_tokens": 200, "held_out": 2}
    plain = config_for(target, tmp_path, tmp_path / "out", checks=checks).model_dump()
    config = TrainConfig(**(plain | {"data": data}))
    prepared = prepare(config, CPU)
    assert prepared.num_contaminated == 1 and len(prepared.training) == 27
    strict = TrainConfig(**(plain | {"data": data, "checks": checks | {"contaminated": "refuse"}}))
    with pytest.raises(TrainingCheckFailed, match="evaluation prompts in training data"):
        prepare(strict, CPU)
