"""What is loaded is left alone by the garbage collector, what comes later is not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from dflash_engine import heap

class Node:
    pass

heap.settle_heap()
frozen, thresholds = gc.get_freeze_count(), gc.get_threshold()
assert frozen > 1000, frozen
assert thresholds[0] == heap.ALLOCATIONS, thresholds
node = Node()
node.itself = node
gone = weakref.ref(node)
del node
kept = [[] for _ in range(2 * heap.ALLOCATIONS)]
assert gone() is None
heap.settle_heap()
assert gc.get_freeze_count() <= frozen and gc.get_threshold() == thresholds
"""


def test_a_process_settles_once_and_still_finds_new_cycles():
    # In a process of its own, for the collector has one state a process.
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
