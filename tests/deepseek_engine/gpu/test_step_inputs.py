"""What is sent of block tables; the rest of the inputs is tested by the runner's own tests, step by step."""

import pytest
import torch
from deepseek_engine.step_plan import LAST_SAMPLED, NewSequence, StepRow
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
    return sent(inputs)


def sent(inputs: StepInputs) -> dict[int, int]:
    """Places of the tables and what is sent to them."""
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


def test_whole_rows_are_sequences_whose_numbers_the_host_knows() -> None:
    inputs = inputs_with(7, 8)
    inputs.begin()
    step = inputs.fill_whole(
        [
            StepRow(8, [LAST_SAMPLED], 17, [4, 2], sample=True),
            StepRow(7, [3, 5, 6], 14, [1, 3], sample=True),
        ]
    )
    changes = sent(inputs)
    assert step.token_ids.tolist() == [0, 3, 5, 6]
    assert step.positions.tolist() == [17, 14, 15, 16]
    assert step.slots.tolist() == [2 * 16 + 1, 16 + 14, 16 + 15, 3 * 16]
    assert step.query_starts.tolist() == [0, 1, 4]
    assert step.lengths.tolist() == [18, 17]
    assert step.host_rows is not None
    assert step.host_rows.tolist() == [[1, 18], [3, 17]]
    first = [row * step.tables.shape[1] for row in step.table_rows.tolist()]
    assert [[changes[place], changes[place + 1]] for place in first] == [[4, 2], [1, 3]]
    # The row of the sequence whose last token is meant; the others name none.
    assert step.sources.tolist() == [step.table_rows[0].item(), -1, -1, -1]
    assert (step.max_queries, step.num_decoded, step.prefill) == (3, 4, [])
    tensors = (step.sources, step.lengths, step.query_starts, step.table_rows)
    assert all(tensor.dtype == torch.int32 and tensor.data_ptr() % 16 == 0 for tensor in tensors)
