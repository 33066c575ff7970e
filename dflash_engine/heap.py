"""Keeps Python's garbage collector away from what a running engine holds for life.

A full collection walks through every object of models, tokenizers and libraries. With 512 rows that was 3 of
7.5 ms of the host's work for a round (on a 2-core Xeon that others used too), all in a few long pauses.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 50_000
"""New objects until the youngest are looked at: about as many as a shard of thousands of rows has."""


def freeze_heap() -> None:
    """Leaves everything that exists now out of later collections."""
    gc.collect()
    gc.freeze()


def thaw_heap() -> None:
    """Takes it back, so that what is no longer used can be freed."""
    gc.unfreeze()


def settle_heap() -> None:
    """`freeze_heap`, and looks less often at what is new; once in a process, when all is imported and loaded.

    For processes through which rows go by the hundred thousand: a row is some twenty objects that live until
    its shard is written, none of them in cycles. Looked at as often as Python does by itself, they cost a
    third of the time of a row without a model.
    """
    if gc.get_threshold()[0] == ALLOCATIONS:
        return
    freeze_heap()
    gc.set_threshold(ALLOCATIONS, *gc.get_threshold()[1:])
