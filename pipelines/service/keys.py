"""API keys: a file of their hashes, with the owner and what the owner may use.

    keys:
      - hash: sha256:0f3c…
        owner: search-team
        requests_per_minute: 600
        tokens_per_minute: 200000
        priority: online

`python -m pipelines.service.keys search-team` makes a key, prints it once, and the entry for the file.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_engine.errors import ConfigError, describe
from dflash_engine.request import Priority
from pipelines.service.errors import ApiError

_PRIORITIES = {"online": Priority.ONLINE, "batch": Priority.BATCH}


class KeyEntry(BaseModel):
    """One key of the file. Without a limit there is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # A key is 256 random bits, so that one round of a fast hash cannot be guessed backwards.
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    owner: str = Field(min_length=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    priority: Literal["online", "batch"] = "online"


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyEntry, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who asks by one key, and what they may use; keys of one owner share the limits."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: Priority = Priority.ONLINE
    cache_salt: str = ""
    """One for each key, so that none can learn from the time of an answer what another has asked."""


ANYONE = Owner("anonymous")


class KeyRing:
    """The keys of a file. Raises `ConfigError` that names the file and the entry."""

    def __init__(self, entries: tuple[KeyEntry, ...]) -> None:
        self._owners = [
            (
                bytes.fromhex(entry.hash.removeprefix("sha256:")),
                Owner(
                    entry.owner,
                    entry.requests_per_minute,
                    entry.tokens_per_minute,
                    _PRIORITIES[entry.priority],
                    _cache_salt(entry.hash),
                ),
            )
            for entry in entries
        ]

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        try:
            tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
            ring = _KeyFile.model_validate(tree)
        except OSError as error:
            raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"key file {path} is not YAML") from error
        except ValidationError as error:
            # Not the input: it may be a key that somebody wrote there in the clear.
            raise ConfigError(f"key file {path}: {describe(error.errors(include_input=False))}") from None
        _check_owners(path, ring.keys)
        return cls(ring.keys)

    def owner(self, key: str) -> Owner:
        """Raises `ApiError` 401. Takes the same time whichever entry fits, and where none does."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found: Owner | None = None
        for known, owner in self._owners:
            if hmac.compare_digest(known, digest):
                found = owner
        if found is None:
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return found


def key_hash(key: str) -> str:
    """How a key stands in the file."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _cache_salt(entry_hash: str) -> str:
    """Requests are logged and sent about: what goes with them is not what the file holds."""
    return hashlib.blake2b(entry_hash.encode(), digest_size=16, person=b"cache salt").hexdigest()


def new_key() -> str:
    return f"sk-dflash-{secrets.token_urlsafe(32)}"


def _check_owners(path: Path, entries: tuple[KeyEntry, ...]) -> None:
    """An owner's limits hold for all keys together, so two entries may not say different ones."""
    limits: dict[str, object] = {}
    for entry in entries:
        asked = (entry.requests_per_minute, entry.tokens_per_minute)
        if limits.setdefault(entry.owner, asked) != asked:
            raise ConfigError(f"key file {path}: the keys of {entry.owner} have different limits")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m pipelines.service.keys OWNER", file=sys.stderr)
        return 2
    key = new_key()
    print(f"key, shown only now: {key}", file=sys.stderr)
    print(yaml.safe_dump([{"hash": key_hash(key), "owner": arguments[0]}], sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
