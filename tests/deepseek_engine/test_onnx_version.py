"""Versions with runner onnxruntime, from version.yaml to an engine that is ready."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.gpu.fusions import COMBINE, EXPERTS, GATE
from deepseek_engine.request import EngineRequest
from deepseek_engine.version import OpenVersion, open_version
from piccard_contract.operators import ONNX_RUNTIME
from piccard_contract.sampling import SamplingParams
from piccard_contract.version_file import VersionFile, VersionFileError

Open = Callable[..., OpenVersion]


@pytest.fixture
def open_with(tmp_path: Path, checkpoint: Path, export_folder: Callable[[str], Path], library: Path) -> Open:
    """Opens a version in tmp_path with these settings beside what it needs."""

    def opened(**settings: Any) -> OpenVersion:
        needed = {"checkpoint": str(checkpoint), "export": str(export_folder("v3")), "ops_library": str(library)}
        values = {"label": "v1", "runner": "onnxruntime", "memory": "64MiB", **needed, **settings}
        (tmp_path / "version.yaml").write_text(VersionFile.model_validate(values).dump())
        return open_version(tmp_path, number=1, home=tmp_path, progress=lambda share: None)

    return opened


def tokens_of(version: OpenVersion, count: int) -> list[int]:
    version.backend.add(EngineRequest("a", [7, 8, 9], SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)))
    tokens: list[int] = []
    while version.backend.has_work():
        tokens += [token for output in version.backend.step() for token in output.token_ids]
    return tokens


def test_it_says_what_the_torch_runner_says(open_with: Open) -> None:
    version = open_with(max_model_len=128)
    assert (version.max_model_len, version.vocab_size, version.device) == (128, 320, "cpu")
    assert tokens_of(version, 12) == tokens_of(open_with(runner="torch", max_model_len=128), 12)


def test_the_operators_are_signs_of_life(open_with: Open) -> None:
    version = open_with()
    before = version.pulse.beats
    tokens_of(version, 1)
    assert version.pulse.beats > before


def test_it_tells_what_the_exports_operators_fuse(open_with: Open) -> None:
    version = open_with()
    assert version.operators is not None
    told = version.operators.report(1, "cpu", "onnxruntime")
    uses = {use.operator for use in told.operators if use.implementation == ONNX_RUNTIME}
    assert uses >= {"DeepSeekMLAPagedAttention", "DeepSeekMoE", "DeepSeekMoEGate", "DeepSeekLogits"}
    assert {fusion.name for fusion in told.fusions if fusion.applies} >= {GATE, EXPERTS, COMBINE}
    assert 0 < told.fused_operators < told.step_operators


def test_relative_paths_are_sought_in_the_home(open_with: Open, tmp_path: Path, library: Path) -> None:
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "ops.so").symlink_to(library)
    assert len(tokens_of(open_with(ops_library="exports/ops.so"), 2)) == 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"export": None}, "export is missing; publish the version again"),
        ({"export": "exports/none"}, "export .*/exports/none is not there; publish the version again"),
        ({"ops_library": None}, "ops_library is missing"),
        ({"device": "cuda:0"}, "device cuda:0 needs onnxruntime-gpu, .* has no CUDAExecutionProvider"),
        ({"precision": "bfloat16"}, "computes in float32 on a CPU, not in bfloat16"),
        ({"cache": {"dtype": "float16"}}, r"cache\.dtype"),
        ({"memory": "1MiB"}, "weights alone"),
    ],
)
def test_what_cannot_be_opened_says_why(open_with: Open, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        open_with(**settings)
    assert isinstance(raised.value, VersionFileError) or "memory" in settings
