"""Each classic failure, made on purpose, is found by its name; the method written down plainly agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_engine.sources import Sources
from dflash_engine.training import draft_forward
from dflash_engine.training.checks import (
    TrainingCheckFailed,
    check_corpus,
    check_features,
    check_labels,
    check_masks,
)
from dflash_engine.training.config import ChecksConfig
from dflash_engine.training.corpus import Corpus, corpus_of
from dflash_engine.training.draft_forward import Blocks, draft_hidden
from dflash_engine.training.draft_weights import Layout, draft_config, initial, tensor_shapes
from dflash_engine.training.engine_check import check_engine
from dflash_engine.training.export import export
from dflash_engine.training.features import compute
from dflash_engine.training.optimizer import Optimizer
from dflash_engine.training.packing import PackedRows, pack
from dflash_engine.training.step import BlockMaker, DeviceRows, TrainStep
from dflash_engine.training.target import Target, find_target, read_frozen
from tests.dflash_engine.plain_draft import PlainDraft
from tests.dflash_engine.training.tiny_run import config_for, target_folder
from tests.helpers import assert_close

CPU = torch.device("cpu")
ROW = 48


@dataclass(frozen=True, slots=True)
class World:
    folder: Path
    sources: Sources
    target: Target
    step: TrainStep
    corpus: Corpus
    rows: PackedRows
    features: Tensor
    """[R, S, F]"""

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.step.layout.views(self.step.flat)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target, a draft with large random weights, and random text with its features."""
    folder = target_folder(tmp_path_factory.mktemp("target"))
    config = config_for(folder, folder, folder / "out")
    sources = find_target(config, CPU)
    draft = draft_config(config.draft, sources.model)
    frozen = read_frozen(config, sources, CPU)
    flat = initial(draft, frozen.final_norm, 0)
    flat += 0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
    layout = Layout(tensor_shapes(draft))
    step = TrainStep(
        draft,
        frozen,
        flat,
        Optimizer(config.optimizer, flat, layout),
        config.loss,
        config.run,
        (2, 6, ROW),
    )
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 300, length).tolist() for length in (20, 17, 9, 30, 12, 25)]
    corpus = corpus_of([(text[:4], text[4:]) for text in texts], 320)
    rows = pack(corpus, ROW, draft.block_size, 0)
    target = Target(config, sources, CPU)
    features = torch.zeros(*rows.tokens.shape, step.features.shape[-1])
    compute(target, rows, draft.target_layer_ids, features)
    return World(folder, sources, target, step, corpus, rows, features)


def failed(check: Callable[[], object]) -> str:
    with pytest.raises(TrainingCheckFailed) as caught:
        check()
    return caught.value.name


def test_what_is_right_passes(world: World):
    check_labels(world.step, world.rows)
    check_masks(world.step, world.weights, world.rows)
    check_features(world.target, world.rows, (0, 2), world.features[0])
    assert check_engine(world.step, world.rows, world.features[0]) < 1e-4


def test_every_block_guesses_what_the_method_says(world: World, tmp_path: Path):
    step, rows = world.step, world.rows
    export(tmp_path / "draft", step.config, world.sources.model, world.weights, "")
    plain = PlainDraft(tmp_path / "draft", world.folder)
    anchors = torch.tensor([[5, 19, 25, 40, 43, 44]]).expand(rows.num_rows, -1)
    numbers = torch.arange(rows.num_rows)
    blocks, _ = step.maker.make(DeviceRows.of(rows, CPU), numbers, anchors, world.features)
    rounded = {name: tensor.bfloat16().float() for name, tensor in world.weights.items()}
    logits = draft_hidden(rounded, step.config, blocks) @ step.frozen.head.T
    compared = 0
    for row, column, length, _, _ in rows.sequences:
        for place, anchor in enumerate(anchors[row].tolist()):
            if column <= anchor < column + length:
                known = rows.tokens[row, column : anchor + 1].tolist()
                expected = plain.logits(known, step.config.block_size)
                assert_close(f"row {row}, anchor {anchor}", expected, logits[row, place], 1e-3)
                compared += 1
    assert compared > 8


@pytest.mark.parametrize(("asked", "made"), [((1, 3), (0, 2)), ((0, 2), (1, 3)), ((0, 2), (0, 3))])
def test_features_off_by_one_layer(world: World, asked: tuple[int, ...], made: tuple[int, ...]):
    wrong = torch.zeros_like(world.features)
    compute(world.target, world.rows, made, wrong)
    name = failed(lambda: check_features(world.target, world.rows, asked, wrong[0]))
    assert name == "features_off_by_one_layer"


def test_features_of_another_row(world: World):
    assert failed(lambda: check_features(world.target, world.rows, (0, 2), world.features[1])) in (
        "wrong_features",
        "features_off_by_one_layer",
    )


def leaking(step: TrainStep, change: Callable[[Blocks], Blocks]) -> TrainStep:
    class Leaky(BlockMaker):
        def make(self, *args: Any) -> Any:
            blocks, labels = step.maker.make(*args)
            return change(blocks), labels

    other = object.__new__(TrainStep)
    other.__dict__.update(step.__dict__)
    other.maker = object.__new__(Leaky)
    return other


def shown_one_more(blocks: Blocks) -> Blocks:
    visible = blocks.visible.clone()
    visible[..., 1:] |= blocks.visible[..., :-1]
    return replace(blocks, visible=visible)


def shown_other_sequences(blocks: Blocks) -> Blocks:
    return replace(blocks, visible=blocks.visible.flip(-1).cumsum(-1).flip(-1) > 0)


def hidden_last(blocks: Blocks) -> Blocks:
    visible = blocks.visible.clone()
    visible[..., :-1] &= blocks.visible[..., 1:]
    return replace(blocks, visible=visible)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (shown_one_more, "mask_leak"),
        (shown_other_sequences, "mask_leak"),
        (hidden_last, "context_hidden"),
    ],
)
def test_a_block_that_sees_too_much_or_too_little(
    world: World, change: Callable[[Blocks], Blocks], name: str
):
    # The first row begins with its only first sequence: take one with two.
    rows = world.rows.part(np.array([max(range(world.rows.num_rows), key=lambda r: len(of_row(world, r)))]))
    last = max(rows.sequences, key=lambda sequence: sequence[1])
    labels = rows.labels.copy()
    labels[0, : last[1]] = 0
    found = failed(
        lambda: check_masks(leaking(world.step, change), world.weights, replace(rows, labels=labels))
    )
    assert found == name


def of_row(world: World, row: int) -> list[Any]:
    return [sequence for sequence in world.rows.sequences if sequence[0] == row]


def test_blocks_that_see_each_other(world: World, monkeypatch: pytest.MonkeyPatch):
    attend = draft_forward._attend

    def mixed_up(query: Tensor, own: Any, context: Any, visible: Tensor) -> Tensor:
        return attend(query, tuple(part.roll(1, 2) + part for part in own), context, visible)

    monkeypatch.setattr(draft_forward, "_attend", mixed_up)
    assert failed(lambda: check_masks(world.step, world.weights, world.rows)) == "mask_leak"


def test_labels_that_are_shifted(world: World):
    shifted = object.__new__(TrainStep)
    shifted.__dict__.update(world.step.__dict__)

    class Late(BlockMaker):
        def make(self, *args: Any) -> Any:
            blocks, labels = world.step.maker.make(*args)
            return blocks, replace(labels, tokens=labels.tokens.roll(1, -1))

    shifted.maker = object.__new__(Late)
    assert failed(lambda: check_labels(shifted, world.rows)) == "position_shift"


def test_context_positions_that_are_shifted_differ_from_the_engine(world: World):
    def late(blocks: Blocks) -> Blocks:
        return replace(
            blocks, context_rope=(blocks.context_rope[0].roll(1, 1), blocks.context_rope[1].roll(1, 1))
        )

    step = leaking(world.step, late)
    assert failed(lambda: check_engine(step, world.rows, world.features[0])) == "engine_disagrees"


def test_a_mask_token_that_is_text(world: World):
    assert failed(
        lambda: check_corpus(corpus_of([([1], [7, 7, 8])], 100), ChecksConfig(min_response_tokens=1), 7)
    ) == ("mask_token_in_text")
