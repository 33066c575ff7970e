"""Real prompts of the repository, for tests of the embedded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data"


def conversations(name: str, num: int, first: int = 0) -> list[list[dict[str, Any]]]:
    """`num` conversations of tests/data/<name>.jsonl from row `first` on."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line)["messages"] for line in lines[first : first + num] if line]
    assert len(rows) == num, f"{name} has too few rows"
    return rows
