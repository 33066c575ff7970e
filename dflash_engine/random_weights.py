"""Random weights in the shapes of a real model: for measuring speed where its checkpoint is not at hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_engine.checkpoint import Checkpoint
from dflash_engine.errors import BadPrompt, BadSampling
from dflash_engine.request import Message

STD = 0.02
"""Of matrices around 0 and of norms around 1, as models are initialised before training."""
NUM_COINS = 4099
"""A prime, so that no period of positions meets the same few coins."""
_STRIDE = 61


class RandomCheckpoint(Checkpoint):
    """Has every tensor that it is asked for, made on the device; equal seeds and calls give equal tensors."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        return tensor.normal_(float("norm" in name), STD, generator=self._generator)

    def finish(self, ignore: Collection[str] = ()) -> None:
        """There is nothing that could be left over."""


class NoTokenizer:
    """Stands in for the tokenizer of a model that has none: token ids in, token ids out, no text."""

    vocab_size = 0
    eos_token_ids: tuple[int, ...] = ()

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Raises `BadPrompt`."""
        raise BadPrompt("a model with random weights has no tokenizer: give token_ids instead of messages")

    def encode(self, text: str) -> list[int]:
        """Raises `BadPrompt`."""
        raise BadPrompt("a model with random weights has no tokenizer: give token_ids instead of text")

    def encode_plain(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, num_tokens: int) -> list[bytes]:
        """Raises `BadSampling`."""
        raise BadSampling("json_schema and regex need a tokenizer, which random weights do not have")

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def stream(self) -> NoText:
        return NoText()


class NoText:
    """The text of an answer that has none; see `dflash_engine.stops.TextStream`."""

    __slots__ = ()

    def push(self, token: int) -> str:
        return ""

    def push_all(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class SimulatedAcceptance:
    """Decides by coin which drafted tokens count as right, for drafts that know nothing of their target.

    Everything is computed as always, only what the drafted tokens are compared with is replaced. The coins
    depend on slot and position alone, so that a captured graph holds them; each token is right with the
    probability at which a block verified as a whole gives `mean` tokens, the target's own counted.
    """

    def __init__(self, mean: float, block_length: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        rate = acceptance_rate(mean, block_length)
        self._coins = (torch.rand(NUM_COINS, generator=generator) < rate).to(device)

    def compared(
        self, fed: Tensor, sequence: Tensor, position: Tensor, drafted: Tensor, said: Tensor
    ) -> Tensor:
        """What to compare the choices with, int64 [T], in place of the tokens `fed` int64 [T].

        sequence and position int32 [T]; drafted bool [T]: which of them the draft made; said int32 [T]: the
        target's choice in the place of each.
        """
        right = self._coins[(sequence * _STRIDE + position) % NUM_COINS]
        return torch.where(drafted, torch.where(right, said, -1), fed)


def acceptance_rate(mean: float, block_length: int) -> float:
    """p with 1 + p + ... + p^(block_length - 1) = mean; 1 <= mean <= block_length."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**power for power in range(block_length)) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def draft_beside(folder: Path) -> Path | None:
    """The draft that stands inside the folder of a model given by its config.json alone."""
    draft = folder / "draft"
    return draft if draft.is_dir() else None
