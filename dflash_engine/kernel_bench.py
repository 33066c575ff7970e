"""Every kernel of a model at several row counts: checked, and timed where the check passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from dflash_engine.catalog import resolve_draft, resolve_model
from dflash_engine.errors import ConfigError
from dflash_engine.kernel_cases import Case, Place, model_cases
from dflash_engine.kernel_cases_attention import other_cases
from dflash_engine.kernel_timing import Ceilings, ceilings, check, kernel_s, plain_s
from dflash_engine.model_config import DraftConfig, ModelConfig, read_draft_config, read_model_config
from dflash_engine.ops import Ops, TritonOps
from dflash_engine.random_weights import draft_beside


def measure(
    model: str, draft: str, rows: Sequence[int], wanted: tuple[str, ...], repeats: int
) -> dict[str, Any]:
    """Lines of the kernels whose names begin with one of `wanted`, and the device's ceilings.

    Raises `ConfigError` without a CUDA device.
    """
    shapes = read_shapes(model, draft)
    if not torch.cuda.is_available():
        raise ConfigError("the kernels are made for GPUs: this needs a CUDA device")
    device, dtype = torch.device("cuda"), torch.bfloat16
    place, ops = Place(device, dtype), TritonOps(device)
    reached = ceilings(device, repeats)
    lines = []
    for num in rows:
        for case in [*model_cases(*shapes, num, place), *other_cases(*shapes, num, place)]:
            if case.name.startswith(wanted):
                lines.append(measured(case, ops, place, reached, repeats))
                torch.cuda.empty_cache()
    if not lines:
        raise ConfigError(f"no kernel's name begins with {' or '.join(wanted)}")
    return {"kernels": lines, "ceilings": asdict(reached)}


def measured(case: Case, ops: Ops, place: Place, reached: Ceilings, repeats: int) -> dict[str, Any]:
    """One line; times only where the check passed."""
    with torch.inference_mode():
        found = check(case, ops, place.dtype, place.device)
    line: dict[str, Any] = {"kernel": case.name, "rows": case.rows, **asdict(found)}
    if not found.passed:
        return line
    seconds = kernel_s(case, ops, place.device, repeats)
    plain = plain_s(case, place.device, repeats)
    return line | {
        "seconds": seconds,
        "plain_seconds": plain,
        "bytes_per_s": case.num_bytes / seconds,
        "flops_per_s": case.num_flops / seconds,
        "share": reached.least_s(case) / seconds,
        "times_torch": None if plain is None else plain / seconds,
    }


def read_shapes(model: str, draft: str) -> tuple[ModelConfig, DraftConfig | None]:
    """Configurations by name; `auto` is the draft in the model's folder, or else the one known for it."""
    folder = resolve_model(model)
    config = read_model_config(folder)
    found = (draft_beside(folder) if draft == "auto" else None) or resolve_draft(draft, model)
    return config, None if found is None else read_draft_config(found, config)
