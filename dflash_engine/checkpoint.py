"""Weights of a model folder, read tensor by tensor, with nothing missing and nothing left over."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dflash_engine.errors import ConfigError
from dflash_engine.raw_config import read_json

if TYPE_CHECKING:
    import torch

PREFIX = "model."
HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that old versions of transformers saved with the weights; they follow from config.json."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's weights, by name. Raises `ConfigError`."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(
            f"{folder} holds pickled PyTorch weights only, which are not read because they can run code; "
            "convert them to safetensors (save_pretrained does)"
        )
    raise ConfigError(f"{folder} holds no .safetensors files")


class Checkpoint:
    """The tensors of a folder. `take` each one once, then `finish`.

    A leading `model.` may be there or not, in the file and in the name asked for: published drafts
    have both forms. Files are mapped, not read: only what is taken comes into memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # safetensors' own annotations leave out what its methods return.
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for path in weight_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
            self._files[path] = handle
            for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                if name in self._file_of:
                    raise ConfigError(f"tensor {name} stands in {self._file_of[name]} and in {path}")
                self._file_of[name] = path
        self._untaken = set(self._file_of)

    def has(self, name: str) -> bool:
        """Whether the tensor is there."""
        return self._find(name) is not None

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU.

        Raises `ConfigError` with the name, and the shape expected and found, where it does not fit.
        """
        found = self._find(name)
        if found is None:
            raise ConfigError(f"tensor {name} {list(shape)} is missing in {self._folder}")
        handle = self._files[self._file_of[found]]
        found_shape = handle.get_slice(found).get_shape()
        if list(found_shape) != list(shape):
            raise ConfigError(
                f"tensor {found} in {self._folder} is {found_shape}, config.json asks for {list(shape)}"
            )
        tensor: torch.Tensor = handle.get_tensor(found)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ConfigError(
                f"tensor {found} in {self._folder} is {tensor.dtype}: quantised weights are not supported"
            )
        self._untaken.discard(found)
        return tensor

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Close the files. Raises `ConfigError` that lists tensors never taken, `ignore` excepted."""
        self._files.clear()
        ignored = {self._find(name) for name in ignore}
        left = sorted(
            name for name in self._untaken if name not in ignored and not name.endswith(HARMLESS_SUFFIXES)
        )
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise ConfigError(
                f"{self._folder} holds tensors that the model has no use for: {', '.join(left[:8])}{more}"
            )

    def _find(self, name: str) -> str | None:
        other = name.removeprefix(PREFIX) if name.startswith(PREFIX) else PREFIX + name
        return next((form for form in (name, other) if form in self._file_of), None)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    if any(not isinstance(name, str) or Path(name).name != name for name in weight_map.values()):
        raise ConfigError(f"{index} names files outside of its folder")
    return weight_map
