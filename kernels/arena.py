"""Memory for weights in huge pages: streaming them in 4 KiB pages stops the prefetcher at every page."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20
_ALIGNMENT = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages


class Arena:
    """Hands out tensors that live as long as any of them; nothing is given back alone."""

    def __init__(self) -> None:
        self._slab: mmap.mmap | None = None
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in huge pages where the system has them."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._slab is None or self._used + num_bytes > len(self._slab):
            self._slab = mmap.mmap(-1, max(SLAB_BYTES, num_bytes), flags=_PRIVATE)
            self._used = 0
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._slab.madvise(mmap.MADV_HUGEPAGE)
        placed = torch.frombuffer(self._slab, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return placed.view(tensor.shape).copy_(tensor)
