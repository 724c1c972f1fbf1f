"""The device's block tables, kept up by what has changed, against those that the scheduler has."""

import numpy as np
from deepseek_engine.gpu.seats import Seats
from deepseek_engine.step_plan import StepRow
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

SEATS, BLOCKS, BLOCK_SIZE = 3, 6, 16
BLOCK = st.integers(0, 40)


def row(identity, count, start, table):
    return StepRow(identity, [5] * count, start, list(table), sample=True)


class SeatsMachine(RuleBasedStateMachine):
    """Steps over more sequences than there are seats, some of which lose their blocks and come back with others."""

    def __init__(self):
        super().__init__()
        self.seats = Seats(SEATS, BLOCKS, BLOCK_SIZE)
        self.device = np.zeros(SEATS * BLOCKS, dtype=np.int32)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.names = 0

    @rule()
    def add(self):
        self.tables[self.names], self.lengths[self.names] = [], 0
        self.names += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data):
        identity = data.draw(st.sampled_from(sorted(self.tables)))
        self.seats.release(identity)
        del self.tables[identity], self.lengths[identity]

    @rule()
    def finish_one_that_never_ran(self):
        self.seats.release(1000)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def preempt(self, data):
        """Its blocks go to others; it comes back with those that others share with it, and new ones."""
        identity = data.draw(st.sampled_from(sorted(self.tables)))
        shared = data.draw(st.integers(0, self.lengths[identity] // BLOCK_SIZE))
        self.tables[identity] = data.draw(st.lists(BLOCK, min_size=shared, max_size=shared))
        self.lengths[identity] = shared * BLOCK_SIZE

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def step(self, data):
        rows = []
        names = st.sampled_from(sorted(self.tables))
        for identity in data.draw(st.lists(names, min_size=1, max_size=SEATS, unique=True)):
            start, table = self.lengths[identity], self.tables[identity]
            stop = min(start + data.draw(st.integers(1, 40)), BLOCKS * BLOCK_SIZE)
            if stop > start:
                missing = -(-stop // BLOCK_SIZE) - len(table)
                table += data.draw(st.lists(BLOCK, min_size=missing, max_size=missing))
                rows.append(row(identity, stop - start, start, table))
                self.lengths[identity] = stop
        self.check(rows)

    def check(self, rows):
        present = {one.sequence_id for one in rows}
        places = [self.seats.place(one, present) for one in rows]
        self.apply(*self.seats.edits())
        assert len(set(places)) == len(places)
        for seat, one in zip(places, rows, strict=True):
            held = self.device[seat * BLOCKS : seat * BLOCKS + len(one.block_table)]
            assert held.tolist() == one.block_table

    def apply(self, places, values):
        # They are written at once, so that of two values for a place either may stay.
        assert len(set(places)) == len(places)
        self.device[places] = values


TestSeats = SeatsMachine.TestCase


def full_house() -> Seats:
    seats = Seats(SEATS, BLOCKS, BLOCK_SIZE)
    for identity in range(SEATS):
        seats.place(row(identity, 1, 0, [identity]), {identity})
    return seats


@given(st.permutations(range(SEATS)), st.integers(1, SEATS))
def test_only_those_that_are_absent_lose_their_seats(order, newcomers):
    seats = full_house()
    staying = order[newcomers:]
    present = {*staying, *range(10, 10 + newcomers)}
    before = {identity: seats.place(row(identity, 1, 1, [identity]), present) for identity in staying}
    taken = [seats.place(row(identity, 1, 0, [9]), present) for identity in range(10, 10 + newcomers)]
    assert len({*before.values(), *taken}) == SEATS
    assert {seats.place(row(identity, 1, 2, [identity]), present) for identity in staying} == set(before.values())


def test_a_seat_that_was_lost_is_found_again():
    seats = full_house()
    seats.place(row(7, 1, 0, [30]), {7})
    seats.edits()
    seat = seats.place(row(0, 2, 0, [31]), {0})
    assert seats.edits() == ([seat * BLOCKS], [31])


def test_a_sequence_that_comes_back_where_it_stood_has_its_new_blocks():
    seats = Seats(SEATS, BLOCKS, BLOCK_SIZE)
    seats.place(row(0, 2 * BLOCK_SIZE, 0, [1, 2]), {0})
    seats.edits()
    # It was preempted; the prefix cache has another's block for its beginning, and its own second one.
    seat = seats.place(row(0, 3, 2 * BLOCK_SIZE, [8, 2, 9]), {0})
    places, values = seats.edits()
    assert dict(zip(places, values, strict=True)) == {seat * BLOCKS: 8, seat * BLOCKS + 2: 9}


def test_a_table_that_did_not_change_sends_nothing():
    seats = Seats(SEATS, BLOCKS, BLOCK_SIZE)
    for start in range(BLOCK_SIZE + 1):
        seats.place(row(0, 1, start, [4, 5]), {0})
        assert len(seats.edits()[0]) == (2 if start == 0 else 0)


def test_what_is_taken_twice_before_it_is_sent_ends_with_the_last():
    seats = Seats(1, BLOCKS, BLOCK_SIZE)
    seats.place(row(0, 1, 0, [4, 5]), {0})
    seats.place(row(1, 1, 0, [6]), {1})
    assert seats.edits() == ([0, 1], [6, 5])


@given(st.lists(BLOCK, min_size=1, max_size=BLOCKS, unique=True), st.data())
def test_slots_are_the_places_of_the_tables_blocks(table, data):
    stop = data.draw(st.integers(1, len(table) * BLOCK_SIZE))
    slots = Seats(SEATS, BLOCKS, BLOCK_SIZE).slots(row(0, 1, 0, table), stop)
    assert slots.dtype == np.int64
    assert slots.tolist() == [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(stop)]
