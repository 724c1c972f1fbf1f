"""Files that people edit hold anything: each reader says so in its own error, whatever it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from piccard_contract.gateway_file import GatewayFileError, read_gateway_file
from piccard_contract.policy import PolicyError, read_policy
from piccard_contract.version_file import VersionFileError, read_version_file
from piccard_contract.yaml_text import YamlTextError, load_yaml

NO_YAML = (
    b"a: [",
    b"\x00",
    # Latin-1, as editors of other systems write it.
    b"# f\xfcr",
    b"\xff\xfea\x00",
    b"since: 2026-02-30",
    b"a: !!int x",
    b"a: !!float x",
    b"a: !!bool x",
    b"a: !!timestamp x",
    b"a: !!python/name:os.system",
    b"{[]: 1}",
    b"a: " + b"9" * 5000,
    b"[" * 1500,
)


@pytest.mark.parametrize("content", NO_YAML, ids=lambda content: repr(content[:12]))
def test_what_is_no_yaml_is_told_by_each_reader(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(YamlTextError):
        load_yaml(content)
    readers: list[tuple[str, Callable[[Path], Any], type[Exception]]] = [
        ("policy.yaml", read_policy, PolicyError),
        ("gateway.yaml", read_gateway_file, GatewayFileError),
        ("version.yaml", lambda path: read_version_file(path.parent), VersionFileError),
    ]
    for name, read, error in readers:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(error, match=f"{name} is not YAML"):
            read(path)


def test_what_is_yaml_is_read() -> None:
    assert load_yaml("a: ü".encode()) == load_yaml("a: ü") == {"a": "ü"}
