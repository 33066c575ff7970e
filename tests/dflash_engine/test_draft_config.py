"""config.json of DFlash drafts, in every layout that was published."""

import pytest

from dflash_engine.errors import ConfigError
from dflash_engine.model_config import build_target_layer_ids, read_draft_config, read_model_config
from tests.helpers import MASK_TOKEN_ID, tiny_draft_folder, tiny_model_folder

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture
def read(tmp_path, target_folder):
    def _read(**changes):
        return read_draft_config(
            tiny_draft_folder(tmp_path, target_folder, **changes), read_model_config(target_folder)
        )

    return _read


def test_the_published_layout_is_read(read):
    draft = read()
    assert (draft.num_layers, draft.hidden_size, draft.intermediate_size) == (2, 64, 96)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim) == (4, 2, 16)
    assert (draft.block_size, draft.mask_token_id) == (8, MASK_TOKEN_ID)
    assert draft.target_layer_ids == (0, 2)
    assert draft.windows == (None, None)
    assert draft.causal == (False, False)
    assert draft.rope.theta == 10000.0


def test_block_size_may_stand_inside_or_be_left_to_the_default(read):
    inside = {"mask_token_id": 5, "target_layer_ids": [0, 2], "block_size": 4}
    assert read(name="inside", block_size=None, dflash_config=inside).block_size == 4
    assert read(name="absent", block_size=None).block_size == 16
    with pytest.raises(ConfigError, match=r"block_size is 8 but dflash_config\.block_size is 4"):
        read(name="both", dflash_config=inside)


def test_the_flat_layout_is_read(read):
    draft = read(dflash_config=None, block_size=6, mask_token_id=7, target_layer_ids=[3, 1])
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (6, 7, (3, 1))


def test_the_layout_of_transformers_5_is_read(read):
    draft = read(
        rope_theta=None, rope_scaling=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    assert draft.rope.theta == 5e5


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ],
)
def test_default_layers_are_the_reference_s(num_target_layers, num_draft_layers, ids):
    assert build_target_layer_ids(num_target_layers, num_draft_layers) == ids


def test_absent_layer_ids_take_the_default(read):
    assert read(dflash_config={"mask_token_id": 0}).target_layer_ids == build_target_layer_ids(4, 2)


def test_sliding_layers_are_causal_unless_the_checkpoint_says_otherwise(read):
    plain = {"mask_token_id": 0, "target_layer_ids": [0, 2]}
    unsaid = read(name="unsaid", **SLIDING)
    assert (unsaid.windows, unsaid.causal) == ((32, None), (True, False))
    assert read(name="top-false", is_causal=False, **SLIDING).causal == (False, False)
    assert read(name="top-true", is_causal=True, **SLIDING).causal == (True, True)
    inner = read(name="inner", dflash_config={**plain, "causal": False}, **SLIDING)
    assert inner.causal == (False, False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 32}, "hidden_size 32 of the draft does not fit the model's 64"),
        ({"vocab_size": 400}, "vocab_size 400 of the draft does not fit the model's 320"),
        ({"num_target_layers": 36}, "num_target_layers 36 of the draft does not fit the model's 4"),
        (
            {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [0]}},
            "mask_token_id 320 lies outside",
        ),
        (
            {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 4]}},
            "names layer 4, the model has 4",
        ),
        ({"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0.5]}}, "not a list of layer numbers"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is missing"),
        ({"block_size": 0}, "block_size 0 is less than 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 draft"),
        ({"dflash_config": {"mask_token_id": 0, "conv_kernel_size": 2}}, "DFlash 2 draft"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window is set"),
    ],
)
def test_a_draft_that_cannot_work_is_refused_in_a_sentence(read, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(**changes)
