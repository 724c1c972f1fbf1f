"""Code is known by its files alone: where it lies, and what was compiled of it, make no difference."""

import importlib
import shutil
import sys
from pathlib import Path

import piccard_contract
import pytest
from piccard_contract.code_hash import ENGINE_PACKAGES, own_code_hash, package_folder, packages_hash


def package(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_copy_has_the_hash_of_the_original(tmp_path: Path) -> None:
    one = package(tmp_path / "one", a="1", b="2")
    two = Path(shutil.copytree(one, tmp_path / "two"))
    (two / "__pycache__").mkdir()
    (two / "__pycache__" / "a.pyc").write_bytes(b"compiled")
    assert packages_hash({"p": one}) == packages_hash({"p": two})


def test_contents_names_and_places_count(tmp_path: Path) -> None:
    folders = [
        {"p": package(tmp_path / "0", a="1", b="2")},
        {"p": package(tmp_path / "1", a="2", b="1")},
        {"p": package(tmp_path / "2", a="12", b="")},
        {"p": package(tmp_path / "3", a="1", c="2")},
        {"q": tmp_path / "0"},
        {"p": tmp_path / "0", "q": package(tmp_path / "5", a="1")},
    ]
    assert len({packages_hash(packages) for packages in folders}) == len(folders)


def test_what_tools_put_beside_code_is_none(tmp_path: Path) -> None:
    folder = package(tmp_path / "p", a="1")
    before = packages_hash({"p": folder})
    for beside in ("__pycache__/a.cpython-311.pyc", ".mypy_cache/3.11/a.data.json", ".DS_Store"):
        (folder / beside).parent.mkdir(parents=True, exist_ok=True)
        (folder / beside).write_text("x")
    assert packages_hash({"p": folder}) == before


def test_a_process_is_known_by_the_folders_that_it_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert package_folder("piccard_contract") == Path(piccard_contract.__file__).parent
    folder = package(tmp_path / "some_code", __init__="x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("some_code")
    # Another of the name comes first now, as after an upgrade.
    package(tmp_path / "new" / "some_code", __init__="x = 2")
    monkeypatch.syspath_prepend(tmp_path / "new")
    assert own_code_hash(("some_code",)) == packages_hash({"some_code": folder})
    shutil.rmtree(folder)
    assert own_code_hash(("some_code",)) == packages_hash({"some_code": folder})
    del sys.modules["some_code"]


def test_the_engine_is_installed() -> None:
    assert len(own_code_hash(ENGINE_PACKAGES)) == 64
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        package_folder("no_such_package")
