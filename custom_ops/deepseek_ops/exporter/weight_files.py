"""Initialisers whose data lies beside the model, one file a layer."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import onnx
import torch
from torch import Tensor

ALIGNMENT = 4096
"""Bytes; a tensor begins at a multiple, so that it can be mapped."""
ELEMENT_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.uint8: onnx.TensorProto.UINT8,
}


class WeightFiles:
    """Writes tensors as they come, and keeps what the model says of them."""

    def __init__(self, folder: Path, progress: Callable[[str], None] | None = None) -> None:
        """`progress` is called with the name of each file that is begun."""
        self.tensors: list[onnx.TensorProto] = []
        self._folder = folder
        self._progress = progress
        self._name = ""
        self._file: BinaryIO | None = None

    def begin(self, name: str) -> None:
        """Go on in a new file, `name`.data."""
        self.finish()
        self._name = f"{name}.data"
        self._file = (self._folder / self._name).open("wb")
        if self._progress:
            self._progress(name)

    def add(self, name: str, tensor: Tensor) -> str:
        """Write a tensor; returns its name."""
        if self._file is None:
            raise RuntimeError("begin has to name a file before a tensor is added")
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset, data = self._file.tell(), tensor.contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(data.data)
        proto = onnx.TensorProto(name=name, data_type=ELEMENT_TYPES[tensor.dtype], dims=list(tensor.shape))
        proto.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", self._name), ("offset", str(offset)), ("length", str(data.nbytes))):
            proto.external_data.add(key=key, value=value)
        self.tensors.append(proto)
        return name

    def finish(self) -> None:
        """Close the file in hand."""
        if self._file is not None:
            self._file.close()
            self._file = None
