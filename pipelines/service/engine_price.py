"""What an hour of one engine costs, as far as anybody said."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_engine.errors import ConfigError
from pipelines.cost import CPU, Price, load_prices
from pipelines.errors import JobRefused
from pipelines.service.config import ServiceConfig


def engine_price(
    config: ServiceConfig, *, use_gpu: bool, num_gpus: int = 1, accelerators: Iterable[str] = ()
) -> Price | None:
    """None where nothing says what the engine runs on, or what that costs.

    `accelerators` are those of the cluster. Raises `ConfigError` where the accelerator that the config names
    has no price.
    """
    kinds = set(accelerators) if use_gpu else {CPU}
    name = config.accelerator or (kinds.pop() if len(kinds) == 1 else None)
    if name is None:
        return None
    try:
        price = load_prices(config.prices).price(name)
    except JobRefused as error:
        if config.accelerator is not None:
            raise ConfigError(f"service.accelerator: {error}") from error
        return None
    gpus = num_gpus if use_gpu else 1
    return Price(price.accelerator, price.usd_per_hour * gpus, price.date, price.source)
