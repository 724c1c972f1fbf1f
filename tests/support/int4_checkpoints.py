"""The weights that an int4 export stands for, as a checkpoint that the engine loads."""

import shutil
from pathlib import Path

import onnx
import torch
from deepseek_engine.kernels.int4_gemm import dequantized
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from torch import Tensor


def exported_tensors(folder: Path) -> dict[str, Tensor]:
    """Every initialiser of the models in an export's folder, by name; bfloat16 as itself."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.onnx")):
        for proto in onnx.load(path).graph.initializer:
            if proto.data_type == onnx.TensorProto.BFLOAT16:
                bits = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.bfloat16)
                found[proto.name] = bits.view(*proto.dims)
            else:
                found[proto.name] = torch.from_numpy(numpy_helper.to_array(proto).copy())
    return found


def dequantized_checkpoint(checkpoint: Path, exported: Path, out: Path, group_size: int) -> Path:
    """The checkpoint, float32, with what the export's packed weights stand for in the place of its own."""
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    tensors = {name: tensor.float() for file in files for name, tensor in file.items()}
    written = exported_tensors(exported)
    for name, q in written.items():
        if q.dtype == torch.uint8 and not name.endswith("_zeros"):
            _replace(tensors, name, q, written[f"{name}_scales"], written[f"{name}_zeros"], group_size)
    save_file(tensors, out / "model.safetensors")
    return out


def _replace(tensors: dict[str, Tensor], name: str, q: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> None:
    if name in tensors:
        tensors[name] = dequantized(q, scales, zeros, tensors[name].shape[1], group_size)
        return
    prefix, kind = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
    experts = [f"{prefix}.{index}" for index in range(q.shape[0])] if q.dim() == 3 else [prefix]
    columns = tensors[f"{experts[0]}.{parts[0]}.weight"].shape[1]
    whole = dequantized(q, scales, zeros, columns, group_size).view(len(experts), -1, columns)
    # Experts for a GPU may have rows and columns of zeros behind their own.
    rows = tensors[f"{experts[0]}.{parts[0]}.weight"].shape[0]
    routed = [name for name in experts if f"{name}.{parts[0]}.weight" in tensors]
    for expert, weight in zip(routed, whole, strict=False):
        for part, half in zip(parts, weight.chunk(len(parts)), strict=True):
            tensors[f"{expert}.{part}.weight"] = half[:rows].contiguous()
    if len(routed) < len(experts):
        # For a GPU the shared experts stand behind the routed ones; they are stored as one, side by side.
        axis = 1 if kind == "down" else 0
        for part, halves in zip(parts, whole[len(routed) :].chunk(len(parts), dim=1), strict=True):
            shared = f"{prefix.removesuffix('experts')}shared_experts.{part}.weight"
            tensors[shared] = torch.cat(halves[:, :rows].unbind(0), dim=axis)
