import numpy as np
import pytest
import torch
from deepseek_engine.gpu.packed_inputs import PackedInputs
from device_kernels import DEVICE
from hypothesis import given
from hypothesis import strategies as st

DTYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
FIELDS = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.sampled_from(list(DTYPES)), st.integers(1, 40)))


def fill(arrays, base):
    for place, name in enumerate(sorted(arrays)):
        arrays[name][:] = np.arange(len(arrays[name])) + base * (place + 1)


@given(FIELDS)
def test_what_is_filled_arrives_by_its_name_and_nowhere_else(fields):
    inputs = PackedInputs(fields, DEVICE)
    for base in (10, 1000, 7, 500):
        arrays = inputs.begin()
        assert {name: array.dtype for name, array in arrays.items()} == {
            name: DTYPES[dtype] for name, (dtype, _) in fields.items()
        }
        fill(arrays, base)
        inputs.send()
        for name, (dtype, count) in fields.items():
            tensor = inputs.tensors[name]
            assert tensor.dtype == dtype
            assert tensor.shape == (count,)
            assert tensor.tolist() == arrays[name].tolist()


@given(FIELDS)
def test_fields_start_where_a_kernel_may_read_them_whole(fields):
    tensors = PackedInputs(fields, DEVICE).tensors
    base = min((tensor.data_ptr() for tensor in tensors.values()), default=0)
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in tensors.values())


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_device_keeps_what_was_sent_while_the_next_is_filled(copies):
    inputs = PackedInputs({"a": (torch.int32, 5)}, DEVICE, copies)
    tensor = inputs.tensors["a"]
    for step in range(2 * copies):
        array = inputs.begin()["a"]
        before = tensor.tolist()
        array[:] = step
        assert tensor.tolist() == before
        inputs.send()
        assert inputs.tensors["a"] is tensor
        assert tensor.tolist() == [step] * 5


def test_a_step_under_way_has_a_host_copy_of_its_own():
    inputs = PackedInputs({"a": (torch.int64, 1)}, DEVICE, copies=3)
    arrays = [inputs.begin()["a"] for _ in range(6)]
    assert len({array.ctypes.data for array in arrays}) == 3
    assert all(one.ctypes.data == other.ctypes.data for one, other in zip(arrays[:3], arrays[3:], strict=True))
