"""Philox against the known answers that come with Random123, and the numbers made of it."""

import numpy as np
import pytest
import torch
from deepseek_engine.random_numbers import UniformStream, key_of, philox4x32_10, uniform, uniforms
from hypothesis import given
from hypothesis import strategies as st

# philox4x32, 10 rounds, of the file kat_vectors of Random123.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_in_all_arithmetics(counter, key, answer):
    assert philox4x32_10(counter, key) == answer
    as_numpy = [np.array([word], dtype=np.uint64) for word in (*counter, *key)]
    assert [int(word[0]) for word in philox4x32_10(tuple(as_numpy[:4]), tuple(as_numpy[4:]))] == list(answer)
    as_torch = [torch.tensor([word], dtype=torch.int64) for word in (*counter, *key)]
    assert [int(word[0]) for word in philox4x32_10(tuple(as_torch[:4]), tuple(as_torch[4:]))] == list(answer)


@given(SEEDS, st.integers(0, 15), st.integers(0, 2**20), st.integers(1, 70))
def test_a_block_of_numbers_is_the_single_numbers(seed, choice, start, count):
    block = uniforms(seed, choice, start, count)
    assert block.tolist() == [uniform(seed, choice, start + offset) for offset in range(count)]
    assert ((block >= 0) & (block < 1)).all()


@given(SEEDS, st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_a_stream_gives_a_position_its_number_in_whatever_order(seed, positions):
    stream = UniformStream(seed, 3)
    assert [stream.at(position) for position in positions] == [uniform(seed, 3, position) for position in positions]


@given(SEEDS)
def test_a_seed_and_its_unsigned_twin_have_one_key(seed):
    assert key_of(seed) == key_of(seed % 2**64)
    assert key_of(seed)[0] + (key_of(seed)[1] << 32) == seed % 2**64


def test_choices_purposes_and_seeds_are_told_apart():
    places = [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0), (2**32, 0, 0, 0), (0, 0, 0, 1)]
    assert len({uniform(*place) for place in places}) == len(places)


def test_numbers_are_uniform():
    numbers = uniforms(7, 0, 0, 64_000)
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    # 63 degrees of freedom: the 0.999 quantile of chi-square is 103.4.
    assert ((counts - 1000) ** 2 / 1000).sum() < 103.4
