"""One model checks the file, `--set` and the command line, and says in one sentence what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import BatchConfig, load_config
from pipelines.errors import JobRefused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "job.yaml"
    file.write_text("input: in.jsonl\noutput: out\nengine: {model: fake}\nshard: {rows: 7}\n")
    return str(file)


def test_settings_go_over_the_file_and_the_command_line_over_both(path: str):
    config = load_config(path, ["shard.rows=9", "input=b.jsonl"], input="c.jsonl", limit=None)
    assert (config.input, config.output, config.shard.rows, config.limit) == ("c.jsonl", "out", 9, None)


def test_settings_are_typed_by_the_model(path: str):
    settings = ["sampling.temperature=1", "engine.draft=none", "sampling.stop=[a, b]", "tags.team=support"]
    config = load_config(path, settings)
    assert config.sampling.temperature == 1.0
    assert config.engine.draft is None
    assert config.sampling.stop == ("a", "b")
    assert config.tags == {"team": "support"}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("foo=1", "unknown setting foo"),
        ("shard.row=1", "unknown setting shard.row"),
        ("engine.modle=x", "engine: engine settings: modle: unknown setting"),
        ("sampling.temperature=-1", "sampling: temperature: Input should be greater than or equal to 0"),
        ("sampling.top_q=1", "sampling: top_q: unknown setting"),
        ("shard.rows=0", "shard.rows: Input should be greater than or equal to 1"),
        ("shard.rows=many", "shard.rows: Input should be a valid integer"),
        ("format=csv", "format: Input should be 'parquet', 'jsonl' or 'openai'"),
        ("actors={min: 2, max: 1}", "actors: max = 1 is less than min = 2"),
        ("input=", "input: Input should be a valid string"),
        ("shard", "--set shard: write it as dotted.key=value"),
        ("input.x=1", "--set input.x=1: input is a value, not a section"),
        ("a=[", "--set a=[: the value is not YAML"),
    ],
)
def test_a_bad_setting_is_named(path: str, setting: str, reason: str):
    with pytest.raises(JobRefused) as caught:
        load_config(path, [setting])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not YAML"),
        ("- a", "is not a mapping"),
        ("", "is not a mapping"),
        ("input: a", "setting output is missing"),
        ("\xff", "is not YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, reason: str):
    file = tmp_path / "bad.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(JobRefused, match=rf"bad\.yaml.* {reason}"):
        load_config(str(file), [])


def test_a_missing_file_is_named():
    with pytest.raises(JobRefused, match=r"config nowhere\.yaml cannot be read: No such file"):
        load_config("nowhere.yaml", [])


def test_a_config_is_frozen():
    config = BatchConfig(input="a", output="b")
    with pytest.raises(ValueError, match="frozen"):
        config.limit = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "batch").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_config_of_the_project_is_valid(path: Path):
    assert load_config(str(path), []).input
