"""What every test shares: no network, poisoned memory, and skips that say why."""

from __future__ import annotations

import os
import sys
from typing import Any

# Set before the libraries that read them are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Each worker of a Ray cluster imports some thousand modules: three times as long where it compiles them too.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

OUR_PACKAGES = ("dflash_engine", "kernels")
UNINITIALISED = ("empty", "empty_like", "empty_strided")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long tests marked full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not config.getoption("--full"):
        skips["full"] = pytest.mark.skip(reason="long; run with --full (make test-full)")
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no code can mistake for a value: NaN, or an index far outside of everything."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


def poisoned(allocate: Any) -> Any:
    """`allocate`, with its memory poisoned when one of our own modules asks for it."""

    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(tensor) if caller.split(".")[0] in OUR_PACKAGES else tensor

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def uninitialised_memory_is_poisoned():
    """Reading memory that was never written shows as NaN instead of as luck."""
    with pytest.MonkeyPatch.context() as patch:
        for name in UNINITIALISED:
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        yield
