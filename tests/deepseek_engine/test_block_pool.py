"""Blocks are never lost, shared wrongly or written by two owners, whatever happens in whatever order."""

import pytest
from deepseek_engine.block_pool import BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

BLOCKS, SIZE = 12, 16


class PoolMachine(RuleBasedStateMachine):
    """Tables grow, shrink, fork, publish and go; after every step the books have to balance."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.tables = {}
        self.lengths = {}
        self.keys = 0

    names = Bundle("names")

    @rule(target=names, tokens=st.integers(1, 5 * SIZE))
    def start(self, tokens):
        name = len(self.tables)
        self.tables[name], self.lengths[name] = [], 0
        self.grow_to(name, tokens)
        return name

    @rule(name=names, more=st.integers(1, 2 * SIZE))
    def grow(self, name, more):
        self.grow_to(name, self.lengths[name] + more)

    def grow_to(self, name, tokens):
        table, before, available = self.tables[name], list(self.tables[name]), self.pool.num_available
        missing = self.pool.blocks_for(tokens) - len(table)
        if self.pool.reserve(table, tokens):
            assert len(table) == max(len(before), self.pool.blocks_for(tokens))
            assert all(self.pool.references(block) == 1 for block in table[len(before) :])
            self.lengths[name] = max(tokens, self.lengths[name])
        else:
            assert missing > available
            assert table == before

    @rule(name=names, data=st.data())
    def truncate(self, name, data):
        tokens = data.draw(st.integers(0, self.lengths[name]))
        kept = self.pool.truncate(self.tables[name], tokens)
        assert tokens - SIZE < kept <= tokens
        assert len(self.tables[name]) == self.pool.blocks_for(kept)
        if kept % SIZE:
            partial = self.tables[name][-1]
            assert self.pool.references(partial) == 1
            assert partial not in self.pool._key_of
        self.lengths[name] = kept

    @rule(name=names)
    def publish(self, name):
        full = self.lengths[name] // SIZE
        for block in self.tables[name][:full]:
            self.keys += 1
            self.pool.publish(block, self.keys.to_bytes(8, "little"))

    @rule(target=names, name=names, data=st.data())
    def fork(self, name, data):
        count = data.draw(st.integers(0, self.lengths[name] // SIZE))
        twin = len(self.tables)
        self.tables[twin] = []
        self.pool.share(self.tables[twin], self.tables[name][:count])
        self.lengths[twin] = count * SIZE
        return twin

    @rule(target=names, data=st.data())
    def reuse(self, data):
        known = sorted(self.pool._block_of)
        name = len(self.tables)
        self.tables[name], self.lengths[name] = [], 0
        if known:
            block = self.pool.find(data.draw(st.sampled_from(known)))
            self.pool.share(self.tables[name], [block])
            self.lengths[name] = SIZE
        return name

    @rule(name=consumes(names))
    def release(self, name):
        self.pool.release(self.tables[name])
        assert self.tables[name] == []
        self.lengths[name] = 0

    @rule(block=st.integers(0, BLOCKS - 1))
    def forget(self, block):
        self.pool.forget(block)
        assert block not in self.pool._key_of

    @invariant()
    def references_are_owners(self):
        owners = [block for table in self.tables.values() for block in table]
        for block in range(BLOCKS):
            assert self.pool.references(block) == owners.count(block)

    @invariant()
    def every_block_is_in_one_place(self):
        pool = self.pool
        free, idle = list(pool._free), list(pool._idle)
        held = [block for block in range(BLOCKS) if pool.references(block)]
        assert sorted(free + idle + held) == list(range(BLOCKS))
        assert pool.num_free + pool.num_idle + pool.num_referenced == BLOCKS
        assert all(block in pool._key_of for block in idle)
        assert {key: block for block, key in pool._key_of.items()} == pool._block_of

    @invariant()
    def no_block_is_writable_by_two(self):
        # A table writes from its length on, so the block that its next token falls into has to be its own.
        writable = [
            table[self.lengths[name] // SIZE]
            for name, table in self.tables.items()
            if self.lengths[name] // SIZE < len(table)
        ]
        assert len(writable) == len(set(writable))
        assert all(self.pool.references(block) == 1 and block not in self.pool._key_of for block in writable)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def publish_all(pool, table, prefix):
    for place, block in enumerate(table):
        pool.publish(block, f"{prefix}{place}".encode())


def test_idle_blocks_are_taken_last_and_the_end_of_the_oldest_prefix_first():
    pool = BlockPool(5, 16)
    old, new = [], []
    pool.reserve(old, 32)
    pool.reserve(new, 32)
    publish_all(pool, old, "old")
    publish_all(pool, new, "new")
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_idle) == (1, 4)
    taken = []
    pool.reserve(taken, 32)
    assert pool.find(b"old0") is not None
    assert pool.find(b"old1") is None
    pool.reserve(taken, 48)
    assert pool.find(b"old0") is None
    assert pool.find(b"new1") is not None


def test_the_first_block_of_a_key_keeps_it():
    pool = BlockPool(2, 16)
    first, twin = [], []
    pool.reserve(first, 16)
    pool.reserve(twin, 16)
    pool.publish(first[0], b"key")
    pool.publish(twin[0], b"key")
    assert pool.find(b"key") == first[0]
    pool.release(twin)
    assert pool.num_free == 1


def test_truncating_within_a_shared_block_gives_the_block_up():
    pool = BlockPool(4, 16)
    table, twin = [], []
    pool.reserve(table, 48)
    pool.share(twin, table[:2])
    assert pool.truncate(table, 24) == 16
    assert table == twin[:1]
    assert pool.truncate(table, 16) == 16


@pytest.mark.parametrize(("blocks", "size", "word"), [(0, 16, "num_blocks"), (4, 48, "block_size")])
def test_impossible_sizes_are_refused(blocks, size, word):
    with pytest.raises(ValueError, match=word):
        BlockPool(blocks, size)
