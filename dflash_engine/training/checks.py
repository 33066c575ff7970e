"""The classic failures of draft training, each looked for by its name before hours are spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dflash_engine.errors import ConfigError
from dflash_engine.training.config import ChecksConfig
from dflash_engine.training.corpus import Corpus
from dflash_engine.training.draft_forward import Blocks, draft_hidden
from dflash_engine.training.packing import PackedRows
from dflash_engine.training.step import DeviceRows, TrainStep
from dflash_engine.training.target import Target

OWN_ROWS = 8
"""Rows on which responses are compared with the target's own choice."""
NUM_BLOCKS = 6
FAR = 0.2
"""RMS of a difference, as a part of what is expected, that rounding in bfloat16 does not make."""
MOST_MASKS = 0.005
"""Fraction of the tokens that may be the mask: a model says anything now and then."""


class TrainingCheckFailed(ConfigError):
    """Says which failure it is and what was seen. `name` is a stable word for it."""

    def __init__(self, name: str, seen: str) -> None:
        super().__init__(f"{name.replace('_', ' ')}: {seen}")
        self.name = name


def check_corpus(corpus: Corpus, config: ChecksConfig, mask_token_id: int) -> None:
    """Raises `TrainingCheckFailed`: too_few_response_tokens, mask_token_in_text."""
    if corpus.response_tokens < config.min_response_tokens:
        raise TrainingCheckFailed(
            "too_few_response_tokens",
            f"{corpus.response_tokens:,} in {len(corpus):,} sequences; a draft that is worth having takes "
            f"millions (checks.min_response_tokens is {config.min_response_tokens:,})",
        )
    masked = int((corpus.tokens == mask_token_id).sum())
    if masked > MOST_MASKS * len(corpus.tokens):
        raise TrainingCheckFailed(
            "mask_token_in_text",
            f"token {mask_token_id} stands {masked:,} times in the data: as draft.mask_token_id take one "
            "that is no text",
        )


def check_responses(target: Target, rows: PackedRows, config: ChecksConfig, like: Tensor) -> float:
    """Fraction of response tokens that are the target's greedy choice behind what stands before them.

    Raises `TrainingCheckFailed`: responses_not_the_targets.
    """
    some = rows.part(np.arange(min(OWN_ROWS, target.group_rows, rows.num_rows)))
    hidden = target.features(some, (), like.new_zeros((*some.tokens.shape, 0)))
    own = total = 0
    for row, column, length, prompt, _ in some.sequences:
        said = some.tokens[row, column + prompt : column + length]
        best = target.best(hidden[row, column + prompt - 1 : column + length - 1]).cpu().numpy()
        own, total = own + int((best == said).sum()), total + len(said)
    rate = own / max(total, 1)
    if rate < config.min_own_tokens:
        raise TrainingCheckFailed(
            "responses_not_the_targets",
            f"only {rate:.0%} of {total:,} response tokens are the target's own choice behind the tokens "
            "before them: another model's responses, or prompt lengths or offsets that are off by one",
        )
    return rate


def check_features(target: Target, rows: PackedRows, taps: Sequence[int], features: Tensor) -> None:
    """features [S, F] of the first row, as training will see them.

    Raises `TrainingCheckFailed`: features_off_by_one_layer, wrong_features.
    """
    first = rows.part(np.arange(1))
    num_layers, width = target.config.num_layers, target.config.hidden_size
    every = features.new_zeros((1, len(features), num_layers * width))
    hidden = target.features(first, range(num_layers), every)
    layers = every[0].split(width, dim=1)
    if not torch.equal(layers[-1], hidden[0]):
        raise TrainingCheckFailed(
            "features_off_by_one_layer", "the last layer's output is not what the target ends with"
        )
    for layer, found in zip(taps, features.split(width, dim=1), strict=True):
        distances = [_distance(output, found) for output in layers]
        nearest = int(np.argmin(distances))
        if nearest != layer:
            near = abs(nearest - layer) == 1 and distances[nearest] < FAR
            raise TrainingCheckFailed(
                "features_off_by_one_layer" if near else "wrong_features",
                f"what stands for context layer {layer} is the output of layer {nearest}",
            )
        if distances[nearest] > FAR:
            raise TrainingCheckFailed(
                "wrong_features", f"of context layer {layer}, by {distances[nearest]:.1%}: another row's?"
            )


def check_labels(step: TrainStep, rows: PackedRows) -> None:
    """What a block is made of, against the sequences themselves.

    Raises `TrainingCheckFailed`: position_shift.
    """
    numbers, anchors = _some_anchors(rows)
    device = step.features.device
    features = step.features[:1].expand(len(numbers), -1, -1)
    blocks, labels = step.maker.make(
        DeviceRows.of(rows, device),
        torch.from_numpy(numbers).to(device),
        torch.from_numpy(anchors).to(device),
        features,
    )
    for at, (row, columns) in enumerate(zip(numbers, anchors, strict=True)):
        for place, column in enumerate(columns):
            first, sequence = _sequence_at(rows, int(row), int(column))
            expected = sequence[column - first + 1 :][: step.config.block_size - 1]
            found = labels.tokens[at, place][: int(labels.lefts[at, place])].tolist()
            anchor = step.frozen.embedding[int(sequence[column - first])]
            if found != expected.tolist() or not torch.equal(blocks.embedded[at, place, 0], anchor):
                raise TrainingCheckFailed(
                    "position_shift",
                    f"a block at token {column - first} of a sequence is to guess {found}, behind it stand "
                    f"{expected.tolist()}",
                )


def check_masks(step: TrainStep, weights: Mapping[str, Tensor], rows: PackedRows) -> None:
    """By gradients: what each block's guesses depend on is its context and its own block, all of it.

    weights are float32. Raises `TrainingCheckFailed`: mask_leak, context_hidden.
    """
    numbers, anchors = (torch.from_numpy(array[:1]) for array in _some_anchors(rows))
    device = step.features.device
    generator = torch.Generator().manual_seed(0)
    features = torch.randn((1, *step.features.shape[1:]), generator=generator).to(device).requires_grad_()
    made, _ = step.maker.make(DeviceRows.of(rows, device), numbers.to(device), anchors.to(device), features)
    embedded = torch.randn(made.embedded.shape, generator=generator).to(device).requires_grad_()
    blocks = Blocks(features, embedded, made.visible, made.context_rope, made.block_rope)
    with torch.enable_grad():
        hidden = draft_hidden(weights, step.config, blocks)
    for place, column in enumerate(anchors[0].tolist()):
        outer = torch.randn(hidden[0, place].shape, generator=generator).to(device)
        slopes = torch.autograd.grad(hidden[0, place], (features, embedded), outer, retain_graph=True)
        seen = slopes[0][0].abs().amax(-1).cpu() > 0
        first, _ = _sequence_at(rows, int(numbers[0]), column)
        allowed = torch.zeros_like(seen)
        allowed[first:column] = True
        blocks_seen = slopes[1][0].abs().amax((-1, -2)).cpu().nonzero().flatten().tolist()
        if bool((seen & ~allowed).any()) or blocks_seen != [place]:
            raise TrainingCheckFailed(
                "mask_leak",
                f"the block at column {column} sees columns {(seen & ~allowed).nonzero().flatten().tolist()} "
                f"beyond its context {first}..{column - 1}, and blocks {blocks_seen} where it is {place}",
            )
        if not bool((seen == allowed).all()):
            raise TrainingCheckFailed(
                "context_hidden",
                f"the block at column {column} does not see {(allowed & ~seen).nonzero().flatten().tolist()}",
            )


def _some_anchors(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers [1] and NUM_BLOCKS of its anchors [1, n], spread over the first row that has any."""
    row = int(np.flatnonzero(rows.labels.any(axis=1))[0])
    columns = np.flatnonzero(rows.labels[row])
    places = np.unique(np.linspace(0, len(columns) - 1, NUM_BLOCKS).astype(np.int64))
    return np.array([row]), columns[places][None].astype(np.int64)


def _sequence_at(rows: PackedRows, row: int, column: int) -> tuple[int, np.ndarray]:
    """First column and tokens of the sequence that holds this column."""
    for of, first, length, _, _ in rows.sequences:
        if of == row and first <= column < first + length:
            return first, rows.tokens[row, first : first + length]
    raise AssertionError((row, column))


def _distance(expected: Tensor, found: Tensor) -> float:
    """RMS of the difference as a part of what is expected."""
    wanted = expected.float()
    return float(
        (found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-9)
    )
