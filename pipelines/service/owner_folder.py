"""The folder of an owner in the store: what is looked for under it is the owner's, or not there."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NewType

OwnerFolder = NewType("OwnerFolder", str)
"""Made by `owner_folder` only: the name of an owner is anything that stands in the key file."""


def owner_folder(owner: str) -> OwnerFolder:
    """A name for people and a digest that tells owners apart, also where a disk takes A for a."""
    readable = re.sub(r"[^a-z0-9]+", "-", owner.lower())[:40].strip("-") or "owner"
    return OwnerFolder(f"{readable}-{blake2b(owner.encode(), digest_size=10).hexdigest()}")
