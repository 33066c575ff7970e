"""A model and its draft by their config.json alone, as small as the GPU kernels take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BLOCK = 4
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
DRAFT: dict[str, Any] = TARGET | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0]},
}


def write_shapes(folder: Path, **changes: Any) -> Path:
    """`changes` are keys of the model's config.json."""
    (folder / "draft").mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
    (folder / "draft" / "config.json").write_text(json.dumps(DRAFT))
    return folder
