"""What a line of the request log says of versions."""

import math
from typing import Any

import pytest
from piccard_canary.rollout.from_log import ended_at, observed, parse_line
from piccard_canary.rollout.observations import Observation


def line(**values: Any) -> dict[str, Any]:
    """A request that version 2 answered."""
    served = {"first_token_s": 0.2, "token_gap_s": 0.01, "first_load": 3.5, "gap_load": 4.5, "others": 1}
    known = {"at": "2025-01-01T00:00:10.500+00:00", "decision": "ratio", "code": "OK", "version": 2}
    return known | served | {"attempts": [], "truncated": [], "prompt_tokens": 7, "completion_tokens": 5} | values


def seen(**values: Any) -> dict[int, Observation]:
    return dict(observed(line(**values), canary=2))


def test_an_answer_is_measured() -> None:
    assert seen() == {2: Observation(False, False, False, 0.2, 0.01, 3.5, 4.5, 1.0, 7, False, 5)}
    assert math.isnan(seen(token_gap_s=None)[2].token_gap)


@pytest.mark.parametrize(("truncated", "broke"), [([], False), ([2], True)])
def test_a_fallback_is_told_of_both(truncated: list[int], broke: bool) -> None:
    found = seen(version=1, attempts=[{"version": 2, "code": "VERSION_DIED"}], truncated=truncated)
    assert found[2].failed
    assert found[2].fallback
    assert found[2].truncated is broke
    # Its times hold those of the version that failed.
    assert not found[1].failed
    assert math.isnan(found[1].first_token)


def test_both_fail() -> None:
    attempts = [{"version": 2, "code": "INTERNAL"}, {"version": 1, "code": "OUT_OF_MEMORY"}]
    found = seen(version=1, code="OUT_OF_MEMORY", attempts=attempts)
    assert found == {2: Observation(failed=True, fallback=True), 1: Observation(failed=True)}


def test_in_band_errors_count() -> None:
    assert seen(code="INTERNAL", attempts=[{"version": 2, "code": "INTERNAL"}]) == {2: Observation(failed=True)}
    assert seen(code="INTERNAL") == {2: Observation(failed=True)}
    assert seen(code="OF_A_NEWER_ROUTER") == {2: Observation(failed=True)}


@pytest.mark.parametrize("code", ["CONTEXT_LENGTH_EXCEEDED", "CANCELLED", "INVALID_TOKEN"])
def test_the_clients_fault_says_nothing(code: str) -> None:
    assert seen(code=code) == {}
    assert seen(code=code, attempts=[{"version": 2, "code": code}]) == {}


@pytest.mark.parametrize("decision", ["pin", "header", "direct", None])
def test_who_chose_the_version_is_not_like_the_others(decision: str | None) -> None:
    assert seen(decision=decision) == {}


def test_a_canary_that_is_not_there_failed() -> None:
    found = seen(decision="canary_unavailable", version=1)
    assert found[2] == Observation(failed=True, fallback=True)
    assert found[1].first_token == 0.2


def test_who_asked_for_a_canary_where_none_was_set_missed_none() -> None:
    """As callers with the header do in the bake time, when the version that they mean is stable."""
    found = seen(decision="canary_unavailable", version=2, passed_over=None)
    assert set(found) == {2}
    assert not found[2].failed


def test_a_stable_that_is_not_there_failed_what_previous_served() -> None:
    found = seen(decision="fallback", version=1, passed_over=2)
    assert found[2] == Observation(failed=True, fallback=True)
    assert not found[1].failed


def test_no_version_was_found() -> None:
    assert seen(version=None, code="UNAVAILABLE") == {}


def test_lines() -> None:
    assert ended_at(line()) == 1735689610.5
    assert parse_line(b'{"at": "2025') is None
    assert parse_line(b"[1]") is None
    for text in (b"", b"1", b'{"at": "x", "code": "OK"}', b'{"at": 1, "code": "OK"}', b'{"code": "OK"}'):
        assert parse_line(text) is None
    assert parse_line(b'{"at": "2025-01-01T00:00:00+00:00"}') is None
    whole = b'{"at": "2025-01-01T00:00:00+00:00", "code": "OK"}'
    assert parse_line(whole) == {"at": "2025-01-01T00:00:00+00:00", "code": "OK"}


def test_a_version_whose_breaker_is_open_failed_what_it_did_not_get() -> None:
    away = {"decision": "breaker_open", "attempts": []}
    canary = seen(version=1, passed_over=2, **away)
    assert canary[2] == Observation(failed=True, fallback=True)
    assert not canary[1].failed
    stable = seen(version=2, passed_over=1, **away)
    assert stable[1] == Observation(failed=True, fallback=True)
    assert not stable[2].failed
    # Stable was too busy to take it over.
    assert seen(version=None, code="OVERLOADED", passed_over=2, **away) == {2: Observation(failed=True, fallback=True)}


def test_half_of_a_pair_says_how_fast_it_was_and_nothing_else() -> None:
    pair = {"of": 1, "compared": True, "first_difference": 3}
    assert seen(decision=None, shadow=pair) == {
        2: Observation(False, False, False, 0.2, 0.01, 3.5, 4.5, 1.0, 7, True, 5)
    }
    assert seen(decision=None, shadow={}, code="INTERNAL") == {}
