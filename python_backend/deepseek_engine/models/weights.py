"""A checkpoint's tensors, memory-mapped and checked as they are read."""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepseek_engine.models.config import Fields
from deepseek_engine.models.errors import CheckpointError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """Reads tensors by their on-disk names.

    A tensor that already has the wanted dtype and device is the mapped file itself: nothing is copied, and processes
    that serve the same file share its pages.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is called with the bytes read so far and the bytes of all files. Raises CheckpointError."""
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self._files = _open_files(folder)
        self._places = {name: file for file, handle in self._files.items() for name in list(handle.keys())}
        self._listed = _indexed_names(folder)
        self._read: set[str] = set()
        self._progress = progress
        self._bytes_read = 0
        self._bytes = sum(file.stat().st_size for file in self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, in `dtype` or the checkpoint's own choice. Raises CheckpointError if absent or not of `shape`."""
        file = self._find(name)
        entry = self._files[file].get_slice(name)
        if entry.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {file} is of type {entry.get_dtype()}; only {', '.join(DTYPES)} weights can be"
                " loaded: use an unquantized checkpoint"
            )
        found = tuple(entry.get_shape())
        if found != shape:
            raise CheckpointError(
                f"tensor {name} in {file} has shape {list(found)}, but config.json asks for {list(shape)}: the weights"
                " and config.json are not of the same model"
            )
        tensor = self._files[file].get_tensor(name)
        self._count(name, tensor)
        return tensor.to(self.device, dtype or self.dtype)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Report the end, and warn of tensors that nothing read, unless a pattern of `ignore` matches their names."""
        patterns = [re.compile(pattern) for pattern in ignore]
        left = [
            name
            for name in self._places
            if name not in self._read and not any(pattern.search(name) for pattern in patterns)
        ]
        if left:
            logger.warning("%s: %d tensors are not used, such as %s", self.folder, len(left), ", ".join(left[:3]))
        if self._progress:
            self._progress(self._bytes, self._bytes)

    def _find(self, name: str) -> Path:
        file = self._places.get(name)
        if file is not None:
            return file
        if name in self._listed:
            raise CheckpointError(
                f"tensor {name} is not in {self._listed[name]}, where {self.folder / INDEX_FILE} places it: copy that"
                " file again"
            )
        raise CheckpointError(
            f"tensor {name} is missing from {self.folder}: the checkpoint is incomplete, or config.json belongs to"
            " another model"
        )

    def _count(self, name: str, tensor: Tensor) -> None:
        if name in self._read:
            return
        self._read.add(name)
        self._bytes_read += tensor.nbytes
        if self._progress:
            self._progress(self._bytes_read, self._bytes)


def _open_files(folder: Path) -> dict[Path, Any]:
    files = sorted(set(_indexed_names(folder).values())) or [folder / SINGLE_FILE]
    return {file: _open(file) for file in files}


def _indexed_names(folder: Path) -> dict[str, Path]:
    """Tensor name to file, from the index of a sharded checkpoint; empty for a checkpoint of one file."""
    index = folder / INDEX_FILE
    if not index.exists():
        return {}
    names = Fields.read(index).values.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files: copy it again")
    for file in names.values():
        if Path(file).name != file:
            raise CheckpointError(f"{index} names {file!r}, which is not a file beside it: copy the checkpoint again")
    return {name: folder / file for name, file in names.items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {_hint(file)}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({error}): it is truncated or damaged, copy it again"
        ) from error


def _hint(file: Path) -> str:
    if file.name != SINGLE_FILE:
        return f"{INDEX_FILE} names it, so copy it beside the other files"
    if any(file.parent.glob("*.bin")):
        return "weights in PyTorch's .bin format are not loaded, so save the model as safetensors"
    return "copy the checkpoint's weights into the folder"
