"""A snapshot is the installed code, compiled so that a server never writes beside it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from piccard.snapshot import checkpoint_hashes, code_hash, copy_code, installed_code_hash


def test_snapshot_hashes_as_the_installed_code(tmp_path: Path) -> None:
    copy_code(tmp_path)
    assert code_hash(tmp_path / "code") == installed_code_hash()


def test_importing_a_snapshot_writes_nothing(tmp_path: Path) -> None:
    copy_code(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'code')!r})\n"
        "import piccard_contract.request, deepseek_engine.version as v; print(v.__file__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(str(tmp_path))
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_hash_sees_content_and_names(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    (tmp_path / "b" / "x.py").write_text("2")
    (tmp_path / "c" / "y.py").write_text("1")
    assert len({code_hash(tmp_path / name) for name in ("a", "b", "c")}) == 3


def test_checkpoint_hashes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    hashes = checkpoint_hashes(tmp_path)
    assert hashes.tokenizer == hashlib.sha256(b"{}").hexdigest()
    assert hashes.template is not None
    (tmp_path / "model-1.safetensors").write_bytes(b"One")
    assert checkpoint_hashes(tmp_path).weights != hashes.weights
    assert checkpoint_hashes(tmp_path, weights=False).weights is None
