"""How many drafted tokens stood, counted over rounds of verification."""

from __future__ import annotations

import numpy as np


class Accepted:
    """Counts over many rounds of verification."""

    def __init__(self, block_size: int) -> None:
        self.histogram = np.zeros(block_size, np.int64)
        """[block size]: rounds by accepted tokens."""
        self.offered = np.zeros(block_size - 1, np.int64)
        """[block size - 1]: rounds that drafted a k-th token."""
        self.reached = np.zeros(block_size - 1, np.int64)
        """[block size - 1]: rounds that accepted a k-th token."""

    def add(self, drafted: int, accepted: int) -> None:
        self.histogram[accepted] += 1
        self.offered[:drafted] += 1
        self.reached[:accepted] += 1

    @property
    def steps(self) -> int:
        return int(self.histogram.sum())

    @property
    def length(self) -> float:
        """(accepted + steps) / steps, over all rounds together: the target's own token counts."""
        accepted = int((self.histogram * np.arange(len(self.histogram))).sum())
        return (accepted + self.steps) / self.steps if self.steps else 0.0

    @property
    def rates(self) -> list[float]:
        """For each drafted position, how often it stands where it was drafted."""
        return [float(hit) / max(int(of), 1) for hit, of in zip(self.reached, self.offered, strict=True)]
