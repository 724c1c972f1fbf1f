"""Lists to arrays and back."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from piccard_canary.triton_tensors import to_array, to_values
from piccard_contract.tensors import DATATYPES, GENERATE_INPUTS, GENERATE_OUTPUTS, TensorSpec

VALUES = {
    "BOOL": st.booleans(),
    "BYTES": st.binary(max_size=6) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    "FP32": st.floats(width=32, allow_nan=False),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT32": st.integers(0, 2**32 - 1),
}


@given(st.data(), st.sampled_from(sorted(VALUES)))
def test_round_trip(data: st.DataObject, datatype: str) -> None:
    values: list[Any] = data.draw(st.lists(VALUES[datatype], max_size=5))
    array = to_array(TensorSpec("x", datatype, (-1,), "Of the test."), values)

    assert array.dtype == np.dtype(DATATYPES[datatype][1])
    assert array.shape == (len(values),)
    assert to_values(array) == [value.encode() if isinstance(value, str) else value for value in values]


def test_any_shape_is_flat() -> None:
    assert to_values(np.array([[1, 2], [3, 4]])) == [1, 2, 3, 4]
    assert to_values(np.array(5)) == [5]


@pytest.mark.parametrize("spec", [*GENERATE_INPUTS, *GENERATE_OUTPUTS], ids=lambda spec: spec.name)
def test_every_tensor_has_a_type(spec: TensorSpec) -> None:
    assert spec.datatype in VALUES
