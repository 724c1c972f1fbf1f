"""Every operator on a card against float64, eagerly and as a replayed graph; the library is built where triton is."""

import os
from pathlib import Path

import pytest
import torch
from on_a_gpu import check, write_models

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_operators_agree_with_float64_on_a_card(tmp_path: Path) -> None:
    """PICCARD_CUDA_OPS names a library that was built elsewhere."""
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider: install onnxruntime-gpu")
    built = os.environ.get("PICCARD_CUDA_OPS")
    if built is None:
        from deepseek_ops.cuda.build import build_cuda

        built = str(build_cuda())
    write_models(tmp_path)
    assert check(Path(built), tmp_path) == 0
