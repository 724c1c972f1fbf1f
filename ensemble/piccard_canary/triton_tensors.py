"""Between plain lists and numpy arrays of Triton's types."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from piccard_contract.tensors import DATATYPES, TensorSpec


def to_array(spec: TensorSpec, values: Sequence[Any]) -> NDArray[Any]:
    """Values of a tensor as a vector: bool, float32, int64, uint32, or object (bytes) for BYTES."""
    if spec.datatype != "BYTES":
        return np.array(values, dtype=DATATYPES[spec.datatype][1])
    array = np.empty(len(values), dtype=np.object_)
    for index, value in enumerate(values):
        array[index] = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return array


def to_values(array: NDArray[Any]) -> list[Any]:
    """The elements of a tensor of any shape, one after the other, as plain Python values."""
    values: list[Any] = array.reshape(-1).tolist()
    return values
