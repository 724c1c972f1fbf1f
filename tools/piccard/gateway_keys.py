"""`piccard key`: the keys that callers of the gateway show."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from piccard_contract.home import Service
from piccard_contract.lifecycle import now
from piccard_contract.validation import explain
from piccard_gateway.keys import KeysFile, make_key, read_keys
from pydantic import ValidationError

from piccard.arguments import shown
from piccard.durable_file import write_durably
from piccard.errors import OperationError
from piccard.keys import SECRET_MODE
from piccard.state_store import operator_lock


def add_key(home: Path, name: str, **fields: Any) -> str:
    """Make a key for `home` and return it; the home keeps its hash alone.

    Args:
        fields: tenant, rate, priority and services, as `KeyRecord` has them.

    Raises:
        OperationError: a field is wrong, or there is no such home.
    """
    with _changing(home) as file:
        try:
            key, record = make_key(now(), name=name, **fields)
        except ValidationError as error:
            raise OperationError(f"no key was made: {explain(error)}", exit_code=2) from error
        file.keys.append(record)
    return key


def list_keys(home: Path) -> list[dict[str, Any]]:
    """The keys of `home`, the oldest first, without salt and hash."""
    return [record.model_dump(exclude={"salt", "hash"}) for record in _read(_path(home)).keys]


def revoke_key(home: Path, id: str) -> str:
    """Revoke the key of an id; returns what was done.

    Raises:
        OperationError: there is no such key.
    """
    with _changing(home) as file:
        for number, record in enumerate(file.keys):
            if record.id != id:
                continue
            if record.revoked is not None:
                return f"key {id} was revoked before"
            file.keys[number] = record.model_copy(update={"revoked": now()})
            return f"key {id} ({record.name}) is revoked"
    raise OperationError(f"there is no key {shown(id)}; see `piccard key list`")


@contextmanager
def _changing(home: Path) -> Iterator[KeysFile]:
    path = _path(home)
    with operator_lock(home.absolute()):
        file = _read(path)
        before = file.model_copy(deep=True)
        yield file
        if file != before:
            write_durably(path, file.model_dump_json(by_alias=True, indent=1) + "\n", SECRET_MODE)


def _path(home: Path) -> Path:
    path = Service(home.absolute()).gateway_keys
    if not path.parent.is_dir():
        raise OperationError(f"{home} is no home; run `piccard init {home}`")
    return path


def _read(path: Path) -> KeysFile:
    try:
        return read_keys(path)
    except FileNotFoundError:
        return KeysFile()
    except ValidationError as error:
        raise OperationError(f"{path} is broken: {explain(error)}") from error
