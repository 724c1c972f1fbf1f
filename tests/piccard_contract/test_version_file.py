"""version.yaml is read strictly and written back the same."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.home import VERSION_NAME
from piccard_contract.version_file import (
    CacheDtype,
    CacheSettings,
    Hashes,
    Precision,
    Profile,
    Runner,
    VersionFile,
    VersionFileError,
    parse_version_file,
    read_version_file,
)

hexes = st.none() | st.text("0123456789abcdef", min_size=64, max_size=64)
versions = st.builds(
    VersionFile,
    label=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,20}", fullmatch=True),
    checkpoint=st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=30).filter(
        lambda path: ".." not in path.split("/")
    ),
    runner=st.sampled_from(Runner),
    export=st.none() | st.just("exports/0a"),
    ops_library=st.none() | st.just("ops/lib.so"),
    profile=st.sampled_from(Profile),
    precision=st.sampled_from(Precision),
    device=st.sampled_from(["auto", "cpu", "cuda", "cuda:3"]),
    memory=st.none() | st.floats(0.01, 1) | st.sampled_from(["8GiB", "1.5TiB", "512MiB"]),
    max_model_len=st.none() | st.integers(1, 10**6),
    cache=st.builds(CacheSettings, dtype=st.sampled_from(CacheDtype), block=st.sampled_from([16, 32, 64])),
    linked=st.booleans(),
    hashes=st.builds(
        Hashes, code=hexes, weights=hexes, tokenizer=hexes, template=hexes, export=hexes, ops_library=hexes
    ),
)


@given(versions)
def test_dump_round_trip(version: VersionFile) -> None:
    assert parse_version_file(version.dump()) == version


GOOD = {"label": "v1.0.0", "checkpoint": "weights"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"label": ""}, "label"),
        ({"label": "v1\n"}, "label"),
        ({"label": "two words"}, "label"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"runner": "vllm"}, "runner"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:"}, "device"),
        ({"memory": 0}, "memory"),
        ({"memory": 1.5}, "memory"),
        ({"memory": True}, "memory"),
        ({"memory": "lots"}, "memory"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"cache": {"block": 8}}, "cache.block"),
        ({"parallel": {"tp": 2}}, "parallel.tp"),
        ({"speculative": "mtp"}, "speculative"),
        ({"adapters": ["a"]}, "adapters"),
        ({"chekpoint": "x"}, "unknown key 'chekpoint'"),
        ({"schema": 2}, "install a newer one"),
        ({"schema": 0}, "schema"),
    ],
    ids=str,
)
def test_refused_with_the_key(change: dict[str, Any], told: str) -> None:
    import yaml

    with pytest.raises(VersionFileError, match=told):
        parse_version_file(yaml.safe_dump(GOOD | change))


@pytest.mark.parametrize("text", ["", "[]", "label: v1", "{"])
def test_refused_as_a_whole(text: str) -> None:
    with pytest.raises(VersionFileError):
        parse_version_file(text)


def test_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "version.yaml").write_text(VersionFile(**GOOD).dump(), encoding="utf-8")

    assert read_version_file(tmp_path) == VersionFile(**GOOD)
    with pytest.raises(FileNotFoundError):
        read_version_file(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "legal"),
    [("1", True), ("42", True), ("9" * 18, True), ("0", False), ("01", False), ("5-old", False), ("9" * 19, False)],
)
def test_version_names(name: str, legal: bool) -> None:
    # Triton reads a folder's name with stoll: 5-old is version 5 to it, and 20 digits end the server.
    assert bool(re.fullmatch(VERSION_NAME, name)) is legal
