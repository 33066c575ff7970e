"""The settings of a service: what is wrong is told with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_engine.errors import ConfigError
from pipelines.service.serving_config import load_serving

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["local", "fake"])
def test_the_shipped_configs_listen_on_this_machine_only(name: str):
    config = load_serving(str(ROOT / f"configs/serve/{name}.yaml"), [])
    assert (config.service.host, config.service.keys) == ("127.0.0.1", None)


def test_settings_and_the_port_change_the_file(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text("engine: {model: fake}\nservice: {port: 1, model_name: m}\n")
    config = load_serving(str(file), ["replicas.max=3", "ingresses=2"], port=9000)
    assert (config.service.port, config.service.model_name) == (9000, "m")
    assert (config.replicas.max, config.ingresses) == (3, 2)
    assert load_serving(str(file), [], port=None).service.port == 1


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("replicas.min=0", "replicas.min: "),
        ("engine.modle=x", "engine"),
        ("replicas.maximum=3", "replicas.maximum: Extra inputs"),
        ("service.host=0.0.0.0", "name a file of keys, or set allow_anonymous"),
        ("name=a#b", "name: "),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, setting: str, reason: str):
    file = tmp_path / "s.yaml"
    file.write_text("engine: {model: fake}\n")
    with pytest.raises(ConfigError, match=reason):
        load_serving(str(file), [setting])


def test_more_replicas_at_least_than_at_most_are_refused(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text("replicas: {min: 3, max: 2}\n")
    with pytest.raises(ConfigError, match="max = 2 is less than min = 3"):
        load_serving(str(file), [])
