"""What /health says of an engine: the seam is the engine's own word, so a stuck one is scripted."""

from __future__ import annotations

import pytest

from dflash_engine.health import EngineHealth
from tests.pipelines.service.scripted import world


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (EngineHealth(alive=True), 200),
        (EngineHealth(alive=True, stalled_s=29.9), 200),
        (EngineHealth(alive=True, stalled_s=30.1), 503),
        (EngineHealth(alive=False), 503),
    ],
)
def test_a_dead_engine_and_one_stuck_for_longer_than_the_limit_are_not_healthy(said, status):
    with world(settings={"stall_limit_s": 30}, healthy=said) as here:
        assert here.http.get("/health").status_code == status
