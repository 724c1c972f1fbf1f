"""What a stage says of streams, against counting by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_service.clients import Record
from whole_service.stages import Stage

STAGE = Stage("alone", 10.0, 20.0)


def test_answers_outside_of_a_stage_do_not_count() -> None:
    across = Record(9.0, [(9.5, 1), (10.0, 1), (10.25, 2), (20.0, 5)], version=1)
    inside = Record(11.0, [(12.0, 1), (12.5, 1), (13.5, 2)], version=1)
    other = Record(11.0, [(11.5, 30)], version=2)
    found = STAGE.figures([across, inside, other], 1)
    assert found["tokens_per_second"] == pytest.approx((3 + 4) / 10)
    assert found["tokens_per_response"] == pytest.approx(7 / 5)
    assert found["between_tokens_ms"] == pytest.approx({"p50": 500.0, "p99": 990.0, "max": 1000.0})
    # Only one stream lies whole in the stage: 1.5 s from its first response, three tokens after that.
    assert found["per_token_ms"] == pytest.approx({"p50": 500.0, "p99": 500.0, "max": 500.0})
    assert (found["streams_begun"], found["first_token_ms"]["p50"]) == (1, pytest.approx(1000.0))


def test_a_stage_without_streams_tells_of_none() -> None:
    found = STAGE.figures([Record(30.0, [(31.0, 1)], version=1)])
    assert found["tokens_per_second"] == 0.0
    assert found["between_tokens_ms"] is found["per_token_ms"] is found["first_token_ms"] is None


answers = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 8)), max_size=8).map(sorted)
streams = st.lists(st.builds(Record, began=st.just(0.0), answers=answers, version=st.sampled_from([1, 2])), max_size=8)


@given(streams)
def test_the_rates_of_the_versions_make_up_that_of_all(records: list[Record]) -> None:
    parts = [STAGE.figures(records, number)["tokens_per_second"] for number in (1, 2)]
    assert sum(parts) == pytest.approx(STAGE.figures(records)["tokens_per_second"], abs=0.11)
