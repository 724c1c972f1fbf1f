"""Rows are compiled in processes of their own, without a GPU, and once."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's functions do not compile", allow_module_level=True)

from deepseek_engine.kernels import precompile as module
from deepseek_engine.kernels.launcher import Row
from deepseek_engine.kernels.precompile import compile_lines, precompile
from deepseek_engine.kernels.step_inputs_triton import APPLY_EDITS, EMBED
from deepseek_engine.kernels.variants import HOPPER, Variant

EDITS: Row = (APPLY_EDITS.kernel, APPLY_EDITS.variants[0], "bf16")
EMBEDS: Row = (EMBED.kernel, EMBED.variants[0], "bf16")
UNTABLED: Row = (APPLY_EDITS.kernel, Variant("apply_edits", "made", {"BLOCK": 64}, num_warps=1), "bf16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, which processes inherit."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def cubins(cache: Path) -> list[str]:
    return sorted(file.name for file in cache.rglob("*.cubin"))


def marks(cache: Path) -> list[Path]:
    return list(cache.glob("rows-*"))


def test_a_row_is_compiled_ahead_of_time_in_another_process(cache: Path) -> None:
    precompile([EDITS, EMBEDS, EDITS], HOPPER)
    assert cubins(cache) == ["apply_edits_kernel.cubin", "embed_kernel.cubin"]
    assert len(marks(cache)) == 1


def test_what_is_marked_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precompile([EDITS], HOPPER)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    precompile([EDITS], HOPPER)
    precompile([], HOPPER)
    with pytest.raises(AssertionError, match="a process was started"):
        precompile([EMBEDS], HOPPER)
    with pytest.raises(AssertionError, match="a process was started"):
        precompile([EDITS], 80)


def test_the_launcher_finds_what_was_compiled(cache: Path) -> None:
    """The cache's key is the same as when a row is compiled at its launch."""
    from deepseek_engine.kernels.aot import compile_variant

    precompile([EDITS], HOPPER)
    before = sorted(cache.rglob("*"))
    kernel, row, dtype = EDITS
    compile_variant(kernel, row, dtype, HOPPER)
    assert sorted(cache.rglob("*")) == before


def test_a_row_that_is_in_no_table_is_left_to_its_first_launch(cache: Path) -> None:
    precompile([UNTABLED], HOPPER)
    assert cubins(cache) == []
    assert len(marks(cache)) == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["in its time", "before it was told its rows"])
def test_a_process_that_fails_leaves_no_mark(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    class Ended(subprocess.Popen[str]):
        """Has ended before anything is written to it."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.wait()

    if at_once:
        monkeypatch.setattr("deepseek_engine.kernels.precompile.subprocess.Popen", Ended)
    monkeypatch.setattr(module, "_python", lambda: str(shutil.which("false")))
    precompile([EDITS], HOPPER)
    assert marks(cache) == []
    assert "failed; theirs are compiled when needed" in caplog.text


def test_a_python_that_cannot_be_started_is_no_failure(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_python", lambda: "/nowhere/python3")
    precompile([EDITS], HOPPER)
    assert marks(cache) == []
    assert "kernels are compiled one by one" in caplog.text


def test_lines_are_compiled_by_their_names(cache: Path) -> None:
    compile_lines([f"apply_edits {EDITS[1].name} bf16 90", f"apply_edits {EDITS[1].name} bf16 80"])
    assert cubins(cache) == ["apply_edits_kernel.cubin"] * 2


def test_the_mark_names_the_rows_and_what_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    lines = ["a b bf16 90"]
    mark = module._mark(lines)
    assert module._mark(list(lines)) == mark
    assert module._mark(["a b bf16 80"]) != mark
    monkeypatch.setattr(triton, "__version__", "0.0")
    assert module._mark(lines) != mark
