"""Mirrored requests: compared, counted apart, bounded, cancelled, and nothing of them reaches a client."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from canary_fakes import Client, Play, Scene
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from piccard_canary.shadow import first_difference
from piccard_contract.errors import ErrorCode
from piccard_contract.policy import Policy
from piccard_contract.request import Charge, GenerateRequest, RequestExtensions
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams

ALL = {"ratio": 1.0}


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(plays: dict[int, Play] | None = None, **policy: Any) -> Scene:
        made.append(Scene(plays or {1: Play(), 2: Play()}, **({"shadow": ALL} | policy)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(**changes: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=9)
    return GenerateRequest(**({"id": "r", "text": "say", "stream": True, "sampling": sampling} | changes))


def outcomes(stage: Scene) -> dict[str, float]:
    return {
        labels["outcome"]: value
        for name, labels, value in stage.counters.samples()
        if name == "piccard_shadow_requests_total" and value
    }


def settled(stage: Scene, number: int = 1) -> None:
    """Wait until so many mirrored requests are over, and their threads are through."""
    wait_until(lambda: sum(outcomes(stage).values()) >= number)
    wait_until(lambda: stage.counted("piccard_shadow_in_flight") == 0)


def own(client: Client) -> None:
    """The client heard stable alone."""
    assert client.error is None
    assert {response.served_version for response in client.responses} == {1}
    assert client.text() == "".join(f"<{1000 + i}>" for i in range(4))
    assert client.finals == 1


tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens)
def test_the_first_difference(one: list[int], other: list[int]) -> None:
    found = first_difference(one, other)
    if found is None:
        assert one == other
    else:
        assert one[:found] == other[:found]
        assert one[found : found + 1] != other[found : found + 1]
    assert found == first_difference(other, one)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("base", "tokens", "agreed"), [(1000, 4, True), (2000, 4, False), (1000, 6, False)])
def test_a_pair_is_compared(scene: Callable[..., Scene], stream: bool, base: int, tokens: int, agreed: bool) -> None:
    stage = scene({1: Play(), 2: Play(base=base, tokens=tokens)})
    own(stage.run(ask(stream=stream)))
    wait_until(lambda: stage.shadow_lines)

    line = stage.shadow_lines[0]
    differs = None if agreed else 0 if base == 2000 else 4
    assert line.shadow is not None
    assert (line.version, line.code, line.id) == (2, "OK", "r")
    assert (line.shadow["of"], line.shadow["compared"], line.shadow["first_difference"]) == (1, True, differs)
    assert (line.prompt_tokens, line.completion_tokens, line.decision, line.tenant) == (7, tokens, None, "")
    report = stage.shadows.report()[2]
    assert (report.pairs, report.compared, report.agreed) == (1, 1, int(agreed))
    assert report.first_differences == ([] if agreed else [differs])
    assert stage.counted("piccard_shadow_pairs_total", version="2", tokens="agree" if agreed else "differ") == 1
    assert stage.counted("piccard_shadow_first_difference_tokens_count", version="2") == (0 if agreed else 1)


def test_both_are_asked_the_same(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.run(ask(sampling=SamplingParams(temperature=1.0), returns=frozenset({"logprobs"}), stream=False))
    settled(stage)
    (_, first, first_outputs), (_, second, second_outputs) = stage.versions.calls
    assert first_outputs == second_outputs
    # The seed that the router dealt, too.
    assert first.sampling == second.sampling
    assert first.sampling.fixed_seed is not None
    one, other = first.extensions.attempt, second.extensions.attempt
    assert one is not None
    assert other is not None
    assert one.cancel_token != other.cancel_token
    assert other.cancel_token.startswith("2.")
    assert first.extensions.coalesce_ms == second.extensions.coalesce_ms


def test_versions_of_other_tokenizers_are_timed_alone(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.loaded[2] = replace(stage.loaded[2], tokenizer_hash="u")
    own(stage.run(ask()))
    settled(stage)
    wait_until(lambda: stage.shadow_lines)
    told = stage.shadow_lines[0].shadow
    assert told is not None
    assert (told["compared"], told["first_difference"]) == (False, None)
    assert stage.counted("piccard_shadow_pairs_total", tokens="uncompared") == 1


@pytest.mark.parametrize("how", [{"fail_at": 0}, {"fail_at": 2}, {"raise_at": 1}, {"end_at": 3}])
def test_a_failure_counts_nowhere_else(scene: Callable[..., Scene], how: dict[str, int]) -> None:
    stage = scene({1: Play(), 2: Play(**how)}, breaker={"consecutive_errors": 1})
    for number in range(1, 4):
        own(stage.run(ask()))
        settled(stage, number)
    assert outcomes(stage) == {"failed": 3}
    for name in ("errors_total", "attempt_failures_total", "fallbacks_total", "breaker_opens_total", "in_flight"):
        assert stage.counted(f"piccard_{name}", version="2") == 0
    wait_until(lambda: len(stage.shadow_lines) == 3)
    assert all(line.shadow == {} and line.code == "INTERNAL" for line in stage.shadow_lines)
    assert [line.attempts for line in stage.lines] == [[], [], []]


def test_nobody_is_charged(scene: Callable[..., Scene]) -> None:
    stage = scene()
    stage.run(ask(charge=Charge(tokens=100, prompt=7)))
    settled(stage)
    # What the client's own request came to, 7 of its prompt and 4.
    assert list(stage.around.completions.totals().values()) == [(100, 11)]
    assert len(stage.lines) == 1


def hanging(stage: Scene) -> Client:
    stage.versions.hanging.clear()
    client = stage.run(ask())
    own(client)
    assert stage.versions.hanging.wait(60)
    return client


def test_they_are_bounded(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(late_at=1), 2: Play(late_at=1)}, shadow={"ratio": 1.0, "max_in_flight": 2})
    clients = [stage.start(ask()) for _ in range(5)]
    wait_until(lambda: outcomes(stage) == {"dropped": 3})
    assert stage.counted("piccard_shadow_in_flight", version="2") == 2
    stage.versions.over.set()
    for client in clients:
        stage.wait_over(client)
        own(client)
    settled(stage, 5)
    assert outcomes(stage) == {"dropped": 3, "pair": 2}


def test_the_second_version_is_never_busier_than_the_first(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(late_at=1), 2: Play(late_at=1)}, shadow={"ratio": 1.0, "max_in_flight": 99})
    # Three requests of its own, and then four of stable's, of which one may be mirrored.
    clients = [stage.start(ask(route=RouteKeys(canary="true"))) for _ in range(3)]
    wait_until(lambda: stage.router.in_flight() == {2: 3})
    wait_until(lambda: all(client.responses for client in clients))
    stables = [stage.start(ask()) for _ in range(4)]
    wait_until(lambda: outcomes(stage) == {"dropped": 3})
    # Those that are dropped may be counted before the one that is not has begun.
    wait_until(lambda: stage.counted("piccard_shadow_in_flight", version="2") == 1)
    stage.versions.over.set()
    for client in (*clients, *stables):
        stage.wait_over(client)
    settled(stage, 4)
    assert outcomes(stage) == {"dropped": 3, "pair": 1}


@pytest.mark.parametrize("busy", [1, 2])
def test_none_is_sent_under_load(scene: Callable[..., Scene], busy: int) -> None:
    stage = scene()
    stage.loaded[busy] = replace(stage.loaded[busy], load=0.7)
    own(stage.run(ask()))
    assert outcomes(stage) == {"dropped": 1}
    assert len(stage.versions.calls) == 1
    stage.loaded[busy] = replace(stage.loaded[busy], load=0.69)
    own(stage.run(ask()))
    settled(stage, 2)
    assert outcomes(stage) == {"dropped": 1, "pair": 1}


@pytest.mark.parametrize(
    ("policy", "route", "changes"),
    [
        ({"shadow": {"ratio": 0.0}}, RouteKeys(), {}),
        ({"canary": None}, RouteKeys(), {}),
        ({}, RouteKeys(canary="true"), {}),
        ({"shadow": {"ratio": 1.0, "version": 1}}, RouteKeys(), {}),
        ({}, RouteKeys(), {"sampling": SamplingParams(temperature=1.0, n=2)}),
    ],
    ids=["off", "no canary", "served by it", "the version itself", "two choices"],
)
def test_what_is_not_mirrored(
    scene: Callable[..., Scene], policy: dict[str, Any], route: RouteKeys, changes: dict[str, Any]
) -> None:
    plays = {1: Play(choices=2 if changes else 1), 2: Play()}
    stage = scene(plays, **policy)
    assert stage.run(ask(route=route, **changes)).error is None
    assert outcomes(stage) == {}
    assert len(stage.versions.calls) == 1


def test_any_version_may_be_mirrored_to(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(), 3: Play(base=3000)}, shadow={"ratio": 1.0, "version": 3}, canary=None)
    own(stage.run(ask()))
    settled(stage)
    assert [version for version, _, _ in stage.versions.calls] == [1, 3]


def test_the_share_is_the_policys(scene: Callable[..., Scene]) -> None:
    stage = scene(shadow={"ratio": 0.25})
    draws = iter([0.0, 0.249, 0.25, 0.9])
    stage.shadows._random.random = lambda: next(draws)
    for sent in (1, 2, 2, 2):
        own(stage.run(ask()))
        settled(stage, sent)
    assert outcomes(stage) == {"pair": 2}


@pytest.mark.parametrize("shadow", [{"ratio": 0.0}, {"ratio": 1.0, "version": 1}])
def test_the_policy_cancels_what_is_under_way(scene: Callable[..., Scene], shadow: dict[str, Any]) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=1)})
    hanging(stage)
    stage.shadows.follow(stage.policy)
    assert outcomes(stage) == {}
    stage.shadows.follow(Policy(canary=2, shadow=shadow))
    assert outcomes(stage) == {"cancelled": 1}
    wait_until(lambda: stage.versions.cancels)
    token = stage.versions.calls[1][1].extensions.attempt
    assert token is not None
    assert stage.versions.cancels[0] == (2, token.cancel_token)
    assert stage.shadow_lines == []
    # The version may not have met it yet: it is told again, and not for ever.
    for _ in range(9):
        stage.shadows.follow(stage.policy)
    wait_until(lambda: len(stage.versions.cancels) == 3)


@pytest.mark.parametrize("how", ["death", "first token", "next token"])
def test_one_that_hangs_is_given_up(scene: Callable[..., Scene], how: str) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=0 if how == "first token" else 1)})
    hanging(stage)
    if how == "death":
        stage.processes[2] = None
    else:
        stage.clock.now += 30.1 if how == "next token" else 60.1
    stage.shadows.follow(stage.policy)
    assert outcomes(stage) == {"failed": 1}
    code = ErrorCode.VERSION_DIED if how == "death" else ErrorCode.DEADLINE_EXCEEDED
    assert [line.code for line in stage.shadow_lines] == [code.value]
    # A process that is gone is told nothing.
    wait_until(lambda: how == "death" or stage.versions.cancels)
    assert bool(stage.versions.cancels) == (how != "death")


def test_who_leaves_takes_the_shadow_along(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(late_at=2), 2: Play()})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    wait_until(lambda: len(stage.versions.calls) == 2)
    token = client.responses[0].cancel_token

    def end(version: int, sent: str) -> bool:
        stage.clock.now += 1.1
        return False

    stage.versions.cancelled = end
    stage.run(GenerateRequest(id="c", extensions=RequestExtensions(cancel=token)))
    stage.watchdog.look()
    stage.wait_over(client)
    settled(stage)
    assert outcomes(stage) == {"cancelled": 1}
    assert stage.shadow_lines == []


def test_a_stream_that_was_resumed_is_no_pair(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=2), 3: Play()}, shadow={"ratio": 1.0, "version": 3}, traffic_ratio=1.0)
    client = stage.run(ask())
    assert client.responses[-1].route_reason == "resumed"
    settled(stage)
    assert outcomes(stage) == {"cancelled": 1}


def test_a_line_is_json(scene: Callable[..., Scene]) -> None:
    import json

    stage = scene()
    own(stage.run(ask()))
    wait_until(lambda: stage.shadow_lines)
    assert json.loads(json.dumps(asdict(stage.shadow_lines[0])))["shadow"]["of"] == 1
