"""What is sent of block tables; the rest of the inputs is tested by the runner's own tests, step by step."""

import pytest
import torch
from deepseek_engine.step_plan import NewSequence, StepRow
from piccard_contract.sampling import SamplingParams

pytest.importorskip("triton")
from deepseek_engine.gpu.sampling_seats import SamplingSeats
from deepseek_engine.gpu.step_inputs import StepInputs

CPU = torch.device("cpu")


def inputs_with(*sequences: int) -> StepInputs:
    sampling = SamplingSeats(4, 32, CPU)
    for sequence in sequences:
        sampling.add(NewSequence(sequence, SamplingParams(temperature=0), [1], [], 0, (), 1))
    return StepInputs(tokens=8, rows=4, context=64, block_size=16, sampling=sampling, device=CPU)


def changes_of(inputs: StepInputs, row: StepRow) -> dict[int, int]:
    """Places of the tables and what a step of one row brings to them."""
    inputs.begin()
    inputs.fill_decodes([row], 1)
    inputs.send()
    tensors = inputs._packed.tensors
    pairs = zip(tensors["edit_places"].tolist(), tensors["edit_values"].tolist(), strict=True)
    return {place: value for place, value in pairs if place >= 0}


def test_a_table_is_sent_by_what_has_changed_in_it() -> None:
    inputs = inputs_with(7)
    first = changes_of(inputs, StepRow(7, [3], 15, [5], sample=True))
    assert list(first.values()) == [5]
    assert list(changes_of(inputs, StepRow(7, [3], 16, [5, 9], sample=True)).values()) == [9]
    assert changes_of(inputs, StepRow(7, [3], 17, [5, 9], sample=True)) == {}


def test_what_was_never_brought_to_the_tables_is_sent_anew() -> None:
    inputs = inputs_with(7)
    row = StepRow(7, [3], 15, [5], sample=True)
    first = changes_of(inputs, row)
    inputs.forget()
    assert changes_of(inputs, row) == first
