"""What a store says about one object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object; `etag` changes whenever the content does."""

    key: str
    size_bytes: int
    etag: str
