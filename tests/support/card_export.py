"""An export in onnxruntime-gpu, for tests on a card."""

import os
from pathlib import Path

import pytest
import torch
from deepseek_engine.gpu.onnx_decoder import PROVIDER, OnnxDecoder, load_onnx_decoder
from deepseek_ops.exporter.weight_format import WeightFormat
from device_graph import write_device_graphs
from device_kernels import DEVICE
from runner_pair import config_of

LIBRARY = "PICCARD_CUDA_OPS"
"""The variable that names the library for CUDA; else it is built, which needs a C++ compiler."""
MEMORY = 4 << 30


def cuda_library() -> Path:
    """The operators for CUDA. Skips the test where there can be none."""
    onnxruntime = pytest.importorskip("onnxruntime")
    if PROVIDER not in onnxruntime.get_available_providers():
        pytest.skip("the onnxruntime that is installed is none for a GPU")
    if named := os.environ.get(LIBRARY):
        return Path(named)
    from deepseek_ops.build import BuildError
    from deepseek_ops.cuda.build import build_cuda

    try:
        return build_cuda()
    except BuildError as error:
        pytest.skip(str(error))


def exported_decoder(
    folder: Path,
    layers: int,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    format: WeightFormat | None = None,
) -> OnnxDecoder:
    """The first layers of a checkpoint, exported to `out`."""
    library, config = cuda_library(), config_of(folder, layers)
    export = write_device_graphs(folder, config, out, dtype, format)
    return load_onnx_decoder(export, library, config, device=DEVICE, memory=MEMORY)
