"""Prefix keys, and which blocks a sequence finds."""

import pytest
from deepseek_engine.block_pool import BlockPool
from deepseek_engine.prefix_cache import PrefixCache, block_key, root_key
from deepseek_engine.sequence import Sequence
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.sampling import SamplingParams


def sequence(tokens, salt=""):
    return Sequence(0, "r", 0, SamplingParams(), list(tokens), len(tokens), 16, 0, salt=salt)


def computed(pool, cache, tokens, salt=""):
    """A sequence whose tokens are all in the cache and published."""
    done = sequence(tokens, salt)
    assert pool.reserve(done.block_table, len(tokens))
    done.num_computed = len(tokens)
    cache.publish(done)
    return done


@pytest.mark.parametrize("size", [16, 32, 64])
@given(first=st.lists(st.integers(0, 3), max_size=200), second=st.lists(st.integers(0, 3), max_size=200))
def test_a_match_is_the_longest_common_run_of_full_blocks(size, first, second):
    pool = BlockPool(64, size)
    cache = PrefixCache(pool, "format")
    owner = computed(pool, cache, first)
    limit = max(len(second) - 1, 0)
    blocks = cache.match(sequence(second), limit)
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert blocks == owner.block_table[: min(common, limit) // size]


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=40), st.integers(0, 39), st.integers(1, 5))
def test_a_key_depends_on_every_token_and_on_the_parent(tokens, place, change):
    root = root_key("format", "", "")
    other = list(tokens)
    other[place % len(tokens)] += change
    assert block_key(root, tokens) == block_key(root, list(tokens))
    assert block_key(root, tokens) != block_key(root, other)
    assert block_key(root, tokens) != block_key(block_key(root, tokens), tokens)


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_roots_are_equal_for_equal_parts_alone(left, right):
    assert (root_key(*left) == root_key(*right)) == (left == right)


@pytest.mark.parametrize(
    ("cache_format", "adapter", "salt"), [("other", "", ""), ("format", "lora", ""), ("format", "", "tenant")]
)
def test_nothing_is_shared_across_formats_adapters_and_salts(cache_format, adapter, salt):
    pool = BlockPool(8, 16)
    computed(pool, PrefixCache(pool, "format"), range(64))
    same = PrefixCache(pool, "format")
    assert len(same.match(sequence(range(64)), 64)) == 4
    assert PrefixCache(pool, cache_format, adapter).match(sequence(range(64), salt), 64) == []


def test_only_full_and_computed_blocks_are_published():
    pool = BlockPool(8, 16)
    cache = PrefixCache(pool, "format")
    half = sequence(range(64))
    pool.reserve(half.block_table, 64)
    half.num_computed = 47
    cache.publish(half)
    assert cache.match(sequence(range(64)), 64) == half.block_table[:2]
    half.num_computed = 48
    cache.publish(half)
    assert cache.match(sequence(range(64)), 64) == half.block_table[:3]


def test_what_was_released_is_found_until_it_is_evicted():
    pool = BlockPool(4, 16)
    cache = PrefixCache(pool, "format")
    done = computed(pool, cache, range(64))
    pool.release(done.block_table)
    assert len(cache.match(sequence(range(64)), 64)) == 4
    other = []
    pool.reserve(other, 32)
    assert len(cache.match(sequence(range(64)), 64)) == 2
