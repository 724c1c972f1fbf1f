"""Which priority a caller gets: lower goes first, in the engine too."""

from hypothesis import given
from hypothesis import strategies as st
from piccard_gateway.caller import ANYONE, Caller

priorities = st.integers(-100, 100)


def given_to(caller: Caller, asked: int | None) -> int:
    claims = caller.claims(asked, b"secret")
    return 0 if claims is None else claims.priority


@given(own=priorities, asked=st.none() | priorities)
def test_nobody_gets_a_better_priority_than_the_key_has(own: int, asked: int | None) -> None:
    assert given_to(Caller("us", own), asked) >= own


@given(own=priorities, worse=st.integers(0, 200))
def test_a_worse_one_is_given_and_none_is_the_keys_own(own: int, worse: int) -> None:
    caller = Caller("us", own)
    assert given_to(caller, None) == own
    assert given_to(caller, min(100, own + worse)) == min(100, own + worse)


@given(asked=priorities)
def test_without_keys_any_is_believed(asked: int) -> None:
    assert given_to(ANYONE, asked) == asked
    assert given_to(ANYONE, None) == 0
