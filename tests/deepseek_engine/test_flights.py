from typing import Any, cast

from deepseek_engine.flights import EARLY_COUNT, EARLY_SECONDS, Flight, Flights
from deepseek_engine.generation import Generation
from deepseek_engine.prompt import Prompt
from piccard_contract.request import GenerateRequest


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def flight(token: str, *, direct: bool = False) -> Flight:
    generation = Generation(
        GenerateRequest(id="a", text="x"),
        Prompt([1], "x"),
        cast(Any, None),
        id="1",
        version=1,
        cancel_token=token,
        direct=direct,
    )
    return Flight(generation, cast(Any, None), direct=direct)


def test_a_token_finds_its_flight_until_it_has_landed() -> None:
    flights, first, second = Flights(), flight("a"), flight("b")
    assert flights.add(first)
    assert flights.add(second)
    assert flights.cancel("b") is second
    assert (first.cancelled, second.cancelled) == (False, True)
    flights.remove(first)
    assert flights.cancel("a") is None


def test_a_cancel_that_comes_first_keeps_its_flight_from_starting() -> None:
    flights = Flights()
    assert flights.cancel("a") is None
    assert not flights.add(flight("a"))
    assert flights.add(flight("b"))


def test_an_early_cancel_is_forgotten_after_a_while() -> None:
    clock = Clock()
    flights = Flights(clock)
    flights.cancel("a")
    clock.now += EARLY_SECONDS + 1
    assert flights.add(flight("a"))


def test_only_so_many_early_cancels_are_remembered() -> None:
    flights = Flights()
    for number in range(EARLY_COUNT + 1):
        flights.cancel(str(number))
    assert flights.add(flight("0"))
    assert not flights.add(flight(str(EARLY_COUNT)))


def test_direct_flights_are_those_without_a_router() -> None:
    flights, direct = Flights(), flight("a", direct=True)
    flights.wait_any(0.0)
    flights.add(flight("b"))
    flights.wait_any(600.0)
    assert flights.direct() == []
    flights.add(direct)
    assert flights.direct() == [direct]
    assert sorted(flights.tokens()) == ["a", "b"]
    flights.remove(direct)
    assert flights.direct() == []
    assert flights.tokens() == ["b"]
