"""Rounds counted along a known answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_engine.accepted import Accepted
from dflash_engine.training.held_out import best_tokens, walk


@pytest.mark.parametrize(
    ("matched", "stopped", "histogram"),
    [
        # Anchors at 0, 3, 4, and 8 tokens in all: 2 accepted, none, 3 accepted and nothing left.
        ([2, 9, 9, 0, 3, 9, 9, 9], True, [1, 0, 1, 1]),
        # By length the last token is always the target's own.
        ([2, 9, 9, 0, 3, 9, 9, 9], False, [1, 0, 2, 0]),
        ([3, 0, 0, 0], True, [0, 0, 0, 1]),
        ([3, 0, 0, 0], False, [0, 0, 1, 0]),
        ([0, 0], False, [1, 0, 0, 0]),
        ([0], True, [0, 0, 0, 0]),
    ],
)
def test_rounds_commit_what_they_accept_and_one_token_more(
    matched: list[int], stopped: bool, histogram: list[int]
):
    accepted = Accepted(4)
    walk(np.minimum(matched, 3), stopped, accepted)
    assert accepted.histogram.tolist() == histogram


def test_the_first_best_token_counts():
    head = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    hidden = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    assert best_tokens(hidden, head, rows=1).tolist() == [0, 2]
