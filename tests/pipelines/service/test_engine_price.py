"""What an engine's hour costs, and where nobody can say."""

from __future__ import annotations

from decimal import Decimal

import pytest

from dflash_engine.errors import ConfigError
from pipelines.service.config import ServiceConfig
from pipelines.service.engine_price import engine_price

TABLE = """
cpu: {usd_per_hour: 0.08, date: 2026-01-01, source: a}
H200: {usd_per_hour: 5.4, date: 2026-01-01, source: b}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(TABLE)
    return lambda **given: ServiceConfig(prices=str(path), **given)


def test_all_gpus_of_an_engine_are_paid(config):
    price = engine_price(config(), use_gpu=True, num_gpus=2, accelerators=["H200"])
    assert price.usd_per_hour == Decimal("10.8")


def test_a_machine_without_gpus_has_the_price_of_one(config):
    assert engine_price(config(), use_gpu=False, num_gpus=2).usd_per_hour == Decimal("0.08")


def test_the_price_is_unknown_among_several_kinds_and_for_a_kind_without_a_price(config):
    assert engine_price(config(), use_gpu=True, accelerators=["H200", "A100"]) is None
    assert engine_price(config(), use_gpu=True, accelerators=["T4"]) is None
    assert engine_price(ServiceConfig(prices="no/such.yaml"), use_gpu=False) is None


def test_an_accelerator_that_is_named_needs_a_price(config):
    named = config(accelerator="H200")
    assert engine_price(named, use_gpu=True, accelerators=["H200", "A100"]).accelerator == "H200"
    with pytest.raises(ConfigError, match=r"service\.accelerator: .* has no price for T4"):
        engine_price(config(accelerator="T4"), use_gpu=True)
