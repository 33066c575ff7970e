"""Keeps Python's garbage collector away from what a running engine holds for life.

Models, tokenizers and libraries are some hundred thousand objects. A full collection walks through all of
them, which takes as long as tens of rounds with hundreds of rows, and comes every few rounds then.
"""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Leaves everything that exists now out of later collections."""
    gc.collect()
    gc.freeze()


def thaw_heap() -> None:
    """Takes it back, so that what is no longer used can be freed."""
    gc.unfreeze()
