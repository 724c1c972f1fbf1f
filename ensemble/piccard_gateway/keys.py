"""Keys of callers: `pk-ID-SECRET`, of which the file holds a salted hash.

A secret has 256 random bits, so one round of SHA-256 over salt and secret is as good as a slow hash; the salt keeps two
files from being compared.
"""

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Literal

from piccard_contract.claims import OWN_TENANT
from pydantic import BaseModel, ConfigDict, Field, field_validator

_FORM = re.compile(r"pk-([0-9a-f]{12})-([A-Za-z0-9_-]{43})\Z")


class KeyRecord(BaseModel):
    """One key.

    Attributes:
        id: the part of the key that names it.
        name: for people.
        tenant: whose prompts share a prefix cache and whose tokens are counted together.
        rate: requests a minute; null for any number.
        priority: of its requests, and the best that they may ask for; lower goes first.
        services: that it may ask; null for all.
        hash: SHA-256 of salt and secret, in hex.
        created: time in UTC, ISO 8601.
        revoked: when it was revoked; such a key stays here, so that a file without a good key keeps the door shut.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    name: str = Field(default="", max_length=128)
    tenant: str = Field(default="", max_length=128)
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    priority: int = Field(default=0, ge=-100, le=100)
    services: list[str] | None = None
    salt: str
    hash: str
    created: str
    revoked: str | None = None

    @field_validator("tenant")
    @classmethod
    def _not_our_own(cls, value: str) -> str:
        if value == OWN_TENANT:
            raise ValueError(f"{OWN_TENANT!r} is the service itself; take another name")
        return value


class KeysFile(BaseModel):
    """The file: all keys that were ever made for a home."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = Field(default=1, alias="schema")
    keys: list[KeyRecord] = Field(default_factory=list)


def make_key(created: str, **fields: object) -> tuple[str, KeyRecord]:
    """A new key and its record. The key is told once; the record cannot give it back.

    Args:
        fields: of `KeyRecord`: name, tenant, rate, priority, services.
    """
    number, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    values = {"id": number, "salt": salt, "hash": _hash(salt, secret), "created": created, **fields}
    return f"pk-{number}-{secret}", KeyRecord.model_validate(values)


def read_keys(path: Path) -> KeysFile:
    """The file at `path`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file.
    """
    return KeysFile.model_validate_json(path.read_bytes())


def find_key(records: dict[str, KeyRecord], key: str) -> KeyRecord | None:
    """The record of `key`, by id; None where it is wrong or revoked. Hashes are compared in constant time."""
    match = _FORM.match(key)
    record = records.get(match[1]) if match else None
    # Whoever asks for what is not there waits for a comparison all the same.
    salt, known = (record.salt, record.hash) if record else ("", _NOBODY)
    good = hmac.compare_digest(_hash(salt, match[2] if match else key), known)
    return record if good and record is not None and record.revoked is None else None


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}{secret}".encode("utf-8", "surrogateescape")).hexdigest()


_NOBODY = "0" * 64
