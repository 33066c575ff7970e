"""The scheduler against a fake device, in pools so small that blocks run out all the time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.dflash_engine.scheduler_world import World

WAYS: dict[str, dict[str, Any]] = {
    "one round at a time": {},
    "one round ahead": {"rounds_ahead": 1},
    "two rounds ahead": {"rounds_ahead": 2},
    "one round ahead, with logprobs in between": {"rounds_ahead": 1, "on_host": True},
    "drafts in spells": {"policy": True},
    "one round ahead, drafts in spells": {"rounds_ahead": 1, "policy": True, "on_host": True},
    "online first": {"rounds_ahead": 1, "policy": True, "on_host": True, "online_first": True},
    "online first, batch with a bound": {
        "rounds_ahead": 1,
        "on_host": True,
        "online_first": True,
        "starving": True,
    },
}
REACHED = {
    "one round at a time": "preempted cached drafts chunks shared",
    "one round ahead": "preempted cached drafts chunks shared ahead held-back thrown-away aborted-in-flight",
    "one round ahead, drafts in spells": "preempted cached drafts chunks shared ahead on-host rebuilt "
    "without-context thrown-away",
    "online first": "preempted cached drafts chunks shared ahead on-host rebuilt held-back thrown-away",
    "online first, batch with a bound": "preempted cached drafts chunks shared ahead on-host promoted due",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 60, 10)], ids=str)
def test_every_sequence_gets_all_its_tokens_and_relies_only_on_its_own_content(
    way: str, seeds: range
) -> None:
    for seed in seeds:
        World(seed, **WAYS[way]).run(num_requests=25)


@pytest.mark.parametrize("way", REACHED)
def test_the_simulation_reaches_what_it_is_for(way: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        world = World(seed, **WAYS[way])
        world.run(num_requests=25)
        seen += world.seen
    assert min(seen[what.replace("-", " ")] for what in REACHED[way].split()) > 20, seen
