"""What the sampling kernels are handed, row by row, against what each sequence asked for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.sampling import MAX_TOKEN_ENTRIES, SamplingParams

pytest.importorskip("triton")
from deepseek_engine.gpu.sampling_seats import COLUMNS, NO_DRAW, SamplingSeats
from deepseek_engine.step_plan import NewSequence

VOCABULARY, SEATS, PADDED = 50, 4, 8
EOS = 7
CPU = torch.device("cpu")
TOKEN = st.integers(0, VOCABULARY - 1)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 2.0]),
        "top_k": st.integers(-1, 60),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([0.0, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "logit_bias": st.dictionaries(TOKEN, st.sampled_from([-3.0, 0.5]), max_size=3),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(TOKEN, max_size=2),
    },
)


def sequence(identity, output=(), seed=5, choice=0, **params):
    return NewSequence(identity, SamplingParams(**params), [1, 2, 3], list(output), choice, (EOS,), seed)


def seats_of(*sequences, count=SEATS):
    seats = SamplingSeats(count, VOCABULARY, CPU)
    for one in sequences:
        seats.add(one)
    return seats


def empty_arrays(rows=PADDED):
    """Arrays that hold another step's numbers."""
    arrays = {name: np.full(rows, 77, dtype=kind) for name, (_, kind) in COLUMNS.items()}
    arrays |= {name: np.full(rows, 77, dtype=np.int32) for name in ("draws", "mask_rows")}
    return arrays | {"edit_starts": np.full(rows + 1, 77, dtype=np.int32)}


def filled(seats, identities, drawn=None, masks=None, padded=PADDED):
    """The kernels' rows of one step, on their way through the arrays."""
    arrays = empty_arrays()
    seats.fill(arrays, identities, drawn or [True] * len(identities), masks or {}, padded)
    return seats.rows({name: torch.from_numpy(array) for name, array in arrays.items()}, padded)


def edits_of(rows, place):
    """Token to what is added to its logit."""
    start, stop = rows.edit_starts[place : place + 2].tolist()
    added = {}
    for token, value in zip(rows.edit_tokens[start:stop].tolist(), rows.edit_values[start:stop].tolist(), strict=True):
        added[token] = added.get(token, 0.0) + value
    return added


def expected_edits(one, num_output):
    params = one.params
    added = dict(params.logit_bias)
    if num_output < params.min_tokens:
        added |= dict.fromkeys((*one.eos_ids, *params.stop_token_ids), -math.inf)
    return added


def is_penalised(params):
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


@given(st.lists(PARAMETERS, min_size=1, max_size=SEATS), st.data())
def test_every_row_has_what_its_sequence_asked_for_at_every_step(parameters, data):
    sequences = [
        sequence(place, output=range(place), seed=place, choice=place, **params)
        for place, params in enumerate(parameters)
    ]
    seats = seats_of(*sequences)
    counts = [len(one.output_ids) for one in sequences]
    for _ in range(4):
        order = data.draw(st.permutations(range(len(sequences))))
        order = order[: data.draw(st.integers(1, len(order)))]
        drawn = [data.draw(st.booleans()) for _ in order]
        padded = data.draw(st.integers(len(order), PADDED))
        rows = filled(seats, order, drawn, padded=padded)
        for place, identity in enumerate(order):
            params = sequences[identity].params
            found = {name: getattr(rows, name)[place].item() for name in COLUMNS}
            assert (found.pop("penalty_rows") >= 0) == is_penalised(params)
            assert found == {
                "temperature": np.float32(0.0 if params.greedy else params.temperature),
                "min_p": np.float32(params.min_p),
                "top_k": params.top_k,
                "top_p": np.float32(params.top_p),
                "repetition": np.float32(params.repetition_penalty),
                "frequency": params.frequency_penalty,
                "presence": params.presence_penalty,
                "seeds": identity,
                "choices": identity,
            }
            assert rows.positions[place] == (counts[identity] if drawn[place] else NO_DRAW)
            assert edits_of(rows, place) == expected_edits(sequences[identity], counts[identity])
        assert (rows.positions[len(order) :] == NO_DRAW).all()
        assert (rows.penalty_rows[len(order) :] == -1).all()
        assert (rows.mask_rows == -1).all()
        assert (rows.edit_starts[len(order) :] == rows.edit_starts[len(order)]).all()
        for identity, draws in zip(order, drawn, strict=True):
            counts[identity] += draws


def test_penalised_sequences_have_rows_of_their_own_with_their_tokens():
    seats = seats_of(
        sequence(0, output=[4, 4, 9], frequency_penalty=0.5),
        sequence(1),
        sequence(2, output=[5], repetition_penalty=1.2),
    )
    rows = filled(seats, [2, 1, 0])
    first, none, last = rows.penalty_rows[:3].tolist()
    assert none == -1
    assert first != last
    assert {token: int(count) for token, count in enumerate(rows.counts[last]) if count} == {4: 2, 9: 1}
    assert {token: int(count) for token, count in enumerate(rows.counts[first]) if count} == {5: 1}
    assert rows.prompt[last].nonzero().flatten().tolist() == [1, 2, 3]


def test_a_row_of_counts_is_empty_again_for_the_next():
    seats = seats_of(sequence(0, output=[4], presence_penalty=1.0), count=1)
    seats.remove(0)
    seats.add(sequence(1, presence_penalty=1.0))
    rows = filled(seats, [1])
    assert not rows.counts[rows.penalty_rows[0]].any()


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_keeps_its_bits(seed):
    rows = filled(seats_of(sequence(0, seed=seed)), [0])
    assert rows.seeds[0].item() % 2**64 == seed


def test_masks_stand_at_their_rows():
    seats = seats_of(*(sequence(place) for place in range(3)))
    mask = bytes([0b101, 0, 0, 0, 0, 0, 0b10])
    rows = filled(seats, [0, 1, 2], masks={1: mask})
    assert rows.mask_rows[:3].tolist() == [-1, 1, -1]
    bits = np.unpackbits(rows.masks[1].numpy(), bitorder="little")
    assert bits.nonzero()[0].tolist() == [0, 2, 49]
    assert (filled(seats, [0, 1, 2]).mask_rows == -1).all()


def test_more_sequences_are_known_than_run_at_once():
    sequences = [sequence(place, seed=1000 + place, min_tokens=1) for place in range(200)]
    seats = seats_of(*sequences)
    rows = filled(seats, [199, 0, 63])
    assert rows.seeds[:3].tolist() == [1199, 1000, 1063]
    for place in range(100):
        seats.remove(place)
    seats.add(sequence(500, seed=3))
    assert filled(seats, [500, 150]).seeds[:2].tolist() == [3, 1150]


def test_the_generation_changes_with_the_tensors_that_graphs_know():
    seats = seats_of(*(sequence(place, presence_penalty=1.0) for place in range(SEATS)))
    rows, generation = filled(seats, [0]), seats.generation
    seats.add(sequence(10))
    assert seats.generation == generation
    assert filled(seats, [0]).counts.data_ptr() == rows.counts.data_ptr()
    seats.add(sequence(11, presence_penalty=1.0))
    assert seats.generation != generation


def test_edits_stay_where_they_are():
    """A graph knows their places."""
    seats = seats_of(sequence(0, logit_bias={3: 1.0}))
    places = {
        (rows.edit_tokens.data_ptr(), rows.edit_values.data_ptr()) for _ in range(3) if (rows := filled(seats, [0]))
    }
    assert len(places) == 1


def test_a_full_house_of_the_most_edits_fits():
    bias = dict.fromkeys(range(8, 8 + MAX_TOKEN_ENTRIES), 0.5)
    stops = list(range(8 + MAX_TOKEN_ENTRIES, 8 + 2 * MAX_TOKEN_ENTRIES))
    seats = SamplingSeats(2, 3 * MAX_TOKEN_ENTRIES, CPU)
    for place in range(2):
        seats.add(sequence(place, logit_bias=bias, stop_token_ids=stops, min_tokens=3))
    rows = filled(seats, [0, 1])
    assert all(len(edits_of(rows, place)) == 2 * MAX_TOKEN_ENTRIES + 1 for place in range(2))


def test_a_sequence_that_comes_by_an_old_name_has_its_own_edits():
    seats = seats_of(sequence(0, logit_bias={3: 1.0}))
    assert edits_of(filled(seats, [0]), 0) == {3: 1.0}
    seats.remove(0)
    seats.add(sequence(0, logit_bias={4: -1.0}))
    assert edits_of(filled(seats, [0]), 0) == {4: -1.0}


def test_one_that_is_removed_twice_gives_one_row_back():
    seats = seats_of(sequence(0))
    for identity in (99, 0, 0):
        seats.remove(identity)
    for place in range(1, 80):
        seats.add(sequence(place, seed=place))
    assert filled(seats, [1, 2, 3]).seeds[:3].tolist() == [1, 2, 3]
    assert all(filled(seats, [place]).seeds[0] == place for place in range(1, 80))
