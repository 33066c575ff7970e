"""Settings of a job: sections that refuse what they do not know, and YAML changed by `dotted.key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from dflash_engine.errors import ConfigError


class Section(BaseModel):
    """Base of the sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_settings(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The file's mapping with the changes made. Raises `ConfigError` in one sentence."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path} is not a mapping of settings")
    for change in changes:
        _apply(tree, change)
    return tree


def _apply(tree: dict[str, Any], change: str) -> None:
    """The value is read as YAML, so 3 is a number."""
    key, equals, text = change.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {change}: write it as dotted.key=value")
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {change}: {section} is a value, not a section")
    try:
        tree[name] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {change}: the value is not YAML") from error
