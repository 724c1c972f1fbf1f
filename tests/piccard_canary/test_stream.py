"""Fallback and resume: whatever a version does, the client gets one whole answer or one error."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from canary_fakes import Client, Play, Scene
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import wait_until
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import GenerateRequest, RequestExtensions
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams

TO_CANARY = RouteKeys(canary="true")


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(plays: dict[int, Play], **settings: Any) -> Scene:
        made.append(Scene(plays, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(**changes: Any) -> GenerateRequest:
    """A streamed greedy request that wants the canary."""
    settings = {
        "id": "r",
        "text": "say",
        "stream": True,
        "route": TO_CANARY,
        "sampling": SamplingParams(temperature=0, max_tokens=9),
    }
    return GenerateRequest(**(settings | changes))


def expected(start: int, *parts: tuple[int, int]) -> str:
    """Text of the tokens: (base, end) of each part, one after the other."""
    text, index = "", start
    for base, end in parts:
        text += "".join(f"<{base + i}>" for i in range(index, end))
        index = end
    return text


def test_a_stream_is_passed_on(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(base=2000)})
    client = stage.run(ask())

    assert client.text() == expected(0, (2000, 4))
    assert client.finals == 1
    assert client.error is None
    # The last one has a status, which the router reads.
    assert client.forwarded == 3
    assert {(r.served_version, r.route_reason) for r in client.responses} == {(2, "header")}
    assert {r.cancel_token for r in client.responses} == {client.responses[0].cancel_token}
    assert stage.counted("piccard_requests_total", version="2", reason="header") == 1
    assert stage.router.streams() == []


def test_a_version_is_asked_for_what_the_router_needs(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play()})
    stage.run(ask(returns=frozenset({"logprobs"}), extensions=RequestExtensions(announce=True, coalesce_ms=7)))
    _, request, outputs = stage.versions.calls[0]

    assert request.stream
    assert request.returns == {"logprobs"}
    assert outputs == {"text_output", "token_ids", "status", "details", "logprobs"}
    assert request.extensions.attempt is not None
    assert request.extensions.attempt.cancel_token.startswith("2.")
    assert not request.extensions.announce
    assert request.extensions.coalesce_ms == 7


@pytest.mark.parametrize(
    "code", [code for code in ErrorCode if code.name in ("INTERNAL", "OUT_OF_MEMORY", "OVERLOADED")]
)
def test_a_failure_before_the_first_token_is_not_seen(scene: Callable[..., Scene], code: ErrorCode) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=0, error=code)})
    client = stage.run(ask())

    assert client.text() == expected(0, (1000, 4))
    assert {(r.served_version, r.route_reason) for r in client.responses} == {(1, "fallback")}
    route = {"decision": "header", "attempts": [{"version": 2, "code": code.value}]}
    assert client.responses[0].details["route"] == client.responses[-1].details["route"] == route
    assert all("route" not in r.details for r in client.responses[1:-1])
    assert stage.counted("piccard_fallbacks_total", version="2", code=code.value) == 1
    assert stage.lines[0].attempts == route["attempts"]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 6),
    st.sampled_from(["fail_at", "raise_at", "end_at"]),
    st.booleans(),
    st.booleans(),
)
def test_a_failure_at_any_token_leaves_a_whole_text(at: int, how: str, stream: bool, logprob: bool) -> None:
    """What was sent, plus what the other version itself gives after it; and nothing twice."""
    failing: dict[str, Any] = {how: at}
    stage = Scene({1: Play(tokens=7), 2: Play(tokens=7, base=2000, **failing)})
    returns = frozenset({"cumulative_logprob"} if logprob else ())
    client = stage.run(ask(stream=stream, returns=returns))

    assert client.error is None
    assert client.text() == expected(0, (2000, at), (1000, 7))
    assert client.responses[-1].served_version == 1
    assert client.responses[-1].route_reason == ("resumed" if at else "fallback")
    assert stage.versions.calls[1][1].output_ids == [2000 + i for i in range(at)]
    assert [token for r in client.responses for token in r.choices[0].token_ids] == [
        *(2000 + i for i in range(at)),
        *(1000 + i for i in range(at, 7)),
    ]
    assert client.responses[-1].usage.completion_tokens == 7
    if logprob:
        # Every token adds -1, whoever made it.
        assert client.responses[-1].choices[0].cumulative_logprob == -7.0
    assert stage.counted("piccard_resumes_total") == (1 if at else 0)
    stage.close()


def test_a_resumed_stream_is_passed_on_again(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(tokens=8), 2: Play(tokens=8, fail_at=2)})
    client = stage.run(ask())

    # Two of version 2; of version 1 neither the first (which tells the route) nor the last (which has a status).
    assert client.forwarded == 2 + 4


def test_prompt_logprobs_come_once(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=2)})
    sampling = SamplingParams(temperature=0, prompt_logprobs=1)
    stage.run(ask(sampling=sampling))

    # Version 2 sent none, so version 1 is still asked for them.
    assert stage.versions.calls[1][1].sampling.prompt_logprobs == 1


def test_a_client_resumes_too(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(tokens=6), 2: Play(tokens=6, fail_at=4)})
    client = stage.run(ask(output_ids=[1, 2]))

    assert stage.versions.calls[1][1].output_ids == [1, 2, 1002, 1003]
    assert client.text() == expected(2, (1000, 6))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokenizer_hash": "other"}, "tokenizers"),
        ({"template_hash": "other"}, "templates"),
        ({"tokenizer_hash": ""}, "tok"),
    ],
    ids=str,
)
def test_what_cannot_be_resumed_ends_with_an_error(
    scene: Callable[..., Scene], change: dict[str, str], told: str
) -> None:
    from dataclasses import replace

    stage = scene({1: Play(), 2: Play(base=2000, fail_at=2, error=ErrorCode.NUMERICAL_ERROR)})
    stage.loaded[1] = replace(stage.loaded[1], **change)
    client = stage.run(ask())

    assert client.text() == expected(0, (2000, 2))
    assert client.error is not None
    assert client.error.code is ErrorCode.RESUME_IMPOSSIBLE
    assert client.error.version == 2
    assert "NUMERICAL_ERROR" in client.error.message
    assert told in client.error.message
    assert stage.counted("piccard_errors_total", code="RESUME_IMPOSSIBLE", version="2") == 1


def test_several_choices_are_not_resumed(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(choices=2), 2: Play(choices=2, fail_at=1)})
    client = stage.run(ask(sampling=SamplingParams(n=2)))

    assert client.error is not None
    assert client.error.code is ErrorCode.RESUME_IMPOSSIBLE


def test_what_the_client_has_not_seen_is_simply_begun_anew(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(choices=2), 2: Play(base=2000, choices=2, fail_at=3)}, streams=False)
    client = stage.run(ask(stream=False, sampling=SamplingParams(n=2)))

    assert [client.text(0), client.text(1)] == [expected(0, (1000, 4))] * 2
    assert client.responses[0].route_reason == "fallback"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("code", [ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.INVALID_TOKEN, ErrorCode.UNSUPPORTED])
def test_the_clients_own_fault_is_told_at_once(scene: Callable[..., Scene], code: ErrorCode, stream: bool) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=0, error=code)})
    client = stage.run(ask(stream=stream))

    assert client.error is not None
    assert client.error.code is code
    assert client.error.version == 2
    assert len(stage.versions.calls) == 1


def test_a_refusal_to_go_on_is_not_the_clients_fault(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(fail_at=2, error=ErrorCode.CONTEXT_LENGTH_EXCEEDED), 2: Play(fail_at=2)})
    client = stage.run(ask())

    assert client.error is not None
    assert client.error.code is ErrorCode.RESUME_IMPOSSIBLE


@pytest.mark.parametrize(
    ("route", "policy"),
    [
        (RouteKeys(version=2), {"fallback_policy": "both"}),
        (RouteKeys(canary="true"), {"fallback_policy": "none"}),
        (RouteKeys(canary="false"), {"fallback_policy": "both"}),
        (RouteKeys(), {"fallback_policy": "canary_to_stable"}),
    ],
    ids=["pin", "policy none", "header false", "stable"],
)
@pytest.mark.parametrize("at", [0, 2])
def test_who_never_falls_back(scene: Callable[..., Scene], route: RouteKeys, policy: dict[str, Any], at: int) -> None:
    failing = Play(fail_at=at, error=ErrorCode.OUT_OF_MEMORY)
    stage = scene({1: failing, 2: failing}, **policy)
    client = stage.run(ask(route=route))

    assert len(stage.versions.calls) == 1
    assert client.error is not None
    assert client.error.code is ErrorCode.OUT_OF_MEMORY
    assert client.error.retry_after is not None


def test_stable_falls_back_to_the_canary_where_both_may(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(fail_at=1), 2: Play()}, fallback_policy="both")
    client = stage.run(ask(route=RouteKeys()))

    assert client.responses[-1].served_version == 2
    assert client.responses[-1].route_reason == "resumed"


def after_promotion(scene: Callable[..., Scene], stable: Play, **policy: Any) -> Scene:
    """Version 2 is stable and plays `stable`; version 1 was stable before."""
    return scene({1: Play(), 2: stable}, **({"stable": 2, "previous": 1, "canary": None} | policy))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_previous_takes_over_what_a_new_stable_fails(scene: Callable[..., Scene], at: int, stream: bool) -> None:
    stage = after_promotion(scene, Play(base=2000, fail_at=at))
    client = stage.run(ask(route=RouteKeys(), stream=stream))

    assert client.text() == expected(0, (2000, at), (1000, 4))
    last = client.responses[-1]
    assert (last.served_version, last.route_reason) == (1, "resumed" if at else "fallback")
    assert last.details["route"] == {"decision": "stable", "attempts": [{"version": 2, "code": "INTERNAL"}]}
    assert stage.lines[-1].truncated == ([2] if at else [])


@pytest.mark.parametrize("at", [0, 2])
def test_previous_takes_over_from_a_new_stable_that_hangs(scene: Callable[..., Scene], at: int) -> None:
    stage = after_promotion(scene, Play(hang_at=at), deadlines={"first_token": 5.0, "between_tokens": 3.0})
    client = stage.start(ask(route=RouteKeys()))
    assert stage.versions.hanging.wait(60)
    stage.clock.now += 5.1
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.text() == expected(0, (1000, 4))
    assert stage.lines[-1].attempts == [{"version": 2, "code": "DEADLINE_EXCEEDED"}]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(
    ("route", "code", "policy"),
    [
        (RouteKeys(version=2), ErrorCode.INTERNAL, {}),
        (RouteKeys(), ErrorCode.INTERNAL, {"fallback_policy": "none"}),
        (RouteKeys(), ErrorCode.INVALID_TOKEN, {}),
        (RouteKeys(), ErrorCode.OVERLOADED, {}),
    ],
    ids=["pin", "none", "client", "full"],
)
def test_what_previous_does_not_take_over(
    scene: Callable[..., Scene], route: RouteKeys, code: ErrorCode, policy: dict[str, Any], at: int
) -> None:
    stage = after_promotion(scene, Play(fail_at=at, error=code), **policy)
    client = stage.run(ask(route=route))

    assert [version for version, _, _ in stage.versions.calls] == [2]
    assert client.error is not None
    assert (client.error.code, client.error.version) == (code, 2)


def test_what_the_canary_and_stable_fail_comes_to_previous(scene: Callable[..., Scene]) -> None:
    plays = {1: Play(), 2: Play(base=2000, fail_at=2), 3: Play(base=3000, fail_at=1)}
    stage = scene(plays, stable=2, previous=1, canary=3)
    client = stage.run(ask())

    assert client.text() == expected(0, (3000, 1), (2000, 2), (1000, 4))
    assert [version for version, _, _ in stage.versions.calls] == [3, 2, 1]


def test_what_a_full_stable_refused_never_comes_to_previous(scene: Callable[..., Scene]) -> None:
    plays = {1: Play(), 2: Play(fail_at=0, error=ErrorCode.OVERLOADED), 3: Play(fail_at=0)}
    stage = scene(plays, stable=2, previous=1, canary=3, fallback_policy="both")
    for route in (TO_CANARY, RouteKeys()):
        client = stage.run(ask(route=route))
        assert client.error is not None
    assert 1 not in {version for version, _, _ in stage.versions.calls}


def test_a_new_stable_takes_over(scene: Callable[..., Scene]) -> None:
    """The version was dropped between the decision and the call."""
    gone = RequestError(ErrorCode.UNAVAILABLE, "version 1 is not loaded")
    stage = scene({1: Play(open_error=gone), 3: Play()}, canary=None)
    stage.around.loaded()
    router_fleet = stage.around.fleet
    fleets = [router_fleet()]
    stage.stable = 3
    object.__setattr__(stage.around, "fleet", lambda: fleets.pop() if fleets else router_fleet())
    client = stage.run(ask(route=RouteKeys()))

    assert client.error is None
    assert client.responses[-1].served_version == 3


def test_both_fail(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(fail_at=3), 2: Play(fail_at=1, base=2000)})
    client = stage.run(ask())

    assert client.text() == expected(0, (2000, 1), (1000, 3))
    assert client.error is not None
    assert client.error.code is ErrorCode.RESUME_IMPOSSIBLE
    assert client.finals == 1
    assert stage.counted("piccard_attempt_failures_total") == 2


def test_both_fail_before_the_first_token(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(fail_at=0, error=ErrorCode.OVERLOADED), 2: Play(fail_at=0)})
    client = stage.run(ask())

    assert client.error is not None
    assert client.error.code is ErrorCode.OVERLOADED
    assert client.error.version == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_missed_deadline_is_met_by_stable(scene: Callable[..., Scene], at: int, stream: bool) -> None:
    stage = scene({1: Play(), 2: Play(base=2000, hang_at=at)}, deadlines={"first_token": 5.0, "between_tokens": 3.0})
    client = stage.start(ask(stream=stream))
    assert stage.versions.hanging.wait(60)
    stage.watchdog.look()
    assert not client.over.wait(0.05)

    stage.clock.now += 5.1 if at == 0 else 3.1
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.text() == expected(0, (2000, at), (1000, 4))
    assert stage.versions.cancels[0][0] == 2
    assert stage.counted("piccard_blocked_attempts", version="2") == 1
    assert stage.counted("piccard_attempt_failures_total", code="DEADLINE_EXCEEDED") == 1


def test_an_abandoned_attempt_is_never_heard_of_again(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(base=2000, hang_at=1)})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stage.clock.now += 1000
    stage.watchdog.look()
    stage.wait_over(client)
    before = client.text()

    # Now the version comes back to life; its thread ends without a word (the client would fail on one).
    stage.versions.over.set()
    wait_until(lambda: stage.counted("piccard_blocked_attempts", version="2") == 0)

    assert client.text() == before
    assert client.finals == 1
    assert stage.counted("piccard_in_flight") == 0


def test_the_answer_to_its_cancel_does_not_end_the_request(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = scene({1: Play(), 2: Play(base=2000, late_at=1, fail_at=2, error=ErrorCode.CANCELLED)})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)

    def post(version: int, token: str) -> None:
        """A cancel that is answered before anything else goes on."""
        stage.versions.over.set()
        wait_until(lambda: stage.counted("piccard_blocked_attempts", version="2") == 0)
        client.over.wait(0.2)

    monkeypatch.setattr(stage.cancels, "post", post)
    stage.clock.now += 1000
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.error is None
    assert client.text() == expected(0, (2000, 1), (1000, 4))


def test_a_death_is_met_at_once(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(base=2000, hang_at=2)})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stage.processes[2] = None
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.text() == expected(0, (2000, 2), (1000, 4))
    assert client.responses[-1].details["route"]["attempts"] == [{"version": 2, "code": "VERSION_DIED"}]
    # Nobody is there to hear a cancel.
    assert stage.versions.cancels == []


def test_a_revived_process_is_another(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(base=2000, hang_at=2)})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stage.processes[2] = 999
    stage.watchdog.look()

    stage.wait_over(client)
    assert client.responses[-1].served_version == 1


def test_the_deadline_of_a_pin_is_told(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=0)})
    client = stage.start(ask(route=RouteKeys(version=2)))
    assert stage.versions.hanging.wait(60)
    stage.clock.now += 61
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.error is not None
    assert client.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert client.error.version == 2


def test_an_abandoned_stream_ends(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=2)}, abandoned_limit=10.0, deadlines={"between_tokens": 3600.0})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stage.clock.now += 10.5
    stage.watchdog.look()
    stage.wait_over(client)

    assert client.error is not None
    assert "abandoned_limit" in client.error.message
    assert len(stage.versions.calls) == 1


def test_tokens_that_come_meanwhile_disprove_a_fault(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(hang_at=1)})
    client = stage.start(ask())
    assert stage.versions.hanging.wait(60)
    stream = stage.router.streams()[0]
    attempt = stream.current
    assert attempt is not None
    attempt.tripped = True
    stream.give_up(attempt, RequestError(ErrorCode.DEADLINE_EXCEEDED, "late"), still=lambda: False)

    assert not client.ended
    assert stream.current is attempt
    assert not attempt.tripped


@pytest.mark.parametrize("stream", [True, False])
def test_a_defect_ends_its_request(scene: Callable[..., Scene], stream: bool) -> None:
    stage = scene({1: Play(), 2: Play(choices=2)})
    stage.versions.plays[2].choices = 0
    client = stage.run(ask(stream=stream, route=RouteKeys(version=2)))

    assert client.error is not None
    assert client.error.code is ErrorCode.INTERNAL
    assert stage.router.streams() == []


def test_a_client_that_cannot_be_sent_to_leaves_nothing_behind(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play()})
    client = Client(broken=True)
    stage.router.answer(ask().model_dump_json(), client)

    assert stage.router.streams() == []
    assert stage.counted("piccard_in_flight") == 0
    assert stage.logged


def test_whole_answers_repeat_the_prompt(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play()}, streams=False)
    client = stage.run(ask(stream=False, repeat_prompt=True))

    assert client.text() == "say" + expected(0, (1000, 4))
    assert len(client.responses) == 1
    assert client.responses[0].usage.prompt_tokens == 7
    assert stage.versions.calls[0][1].repeat_prompt is False
    assert stage.versions.calls[0][1].extensions.coalesce_ms == 200


def test_announcements_come_before_the_first_token(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=0)})
    client = stage.run(ask(extensions=RequestExtensions(announce=True)))

    first, second = client.responses[:2]
    assert [first.choices[0].token_ids, second.choices[0].token_ids] == [[], []]
    assert [first.served_version, second.served_version] == [2, 1]
    assert first.cancel_token != second.cancel_token
    assert client.text() == expected(0, (1000, 4))


def test_an_announcement_that_comes_after_a_token_is_none(scene: Callable[..., Scene]) -> None:
    """The token came along, and a client is told nothing twice; the same where the request is over by then."""
    stage = scene({1: Play(), 2: Play(tokens=3)})
    waiting: list[Callable[[], None]] = []
    stage.announce = waiting.append
    client = stage.run(ask(extensions=RequestExtensions(announce=True)))
    waiting.pop()()

    assert all(response.choices[0].token_ids for response in client.responses)
    assert not waiting


def test_a_sampled_request_gets_one_seed_for_all_attempts(scene: Callable[..., Scene]) -> None:
    stage = scene({1: Play(), 2: Play(fail_at=2)})
    stage.run(ask(sampling=SamplingParams(temperature=1)))
    seeds = {request.sampling.seed for _, request, _ in stage.versions.calls}

    assert len(stage.versions.calls) == 2
    assert len(seeds) == 1
    assert None not in seeds


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=5)])
def test_other_requests_keep_their_seed(scene: Callable[..., Scene], sampling: SamplingParams) -> None:
    stage = scene({1: Play(), 2: Play()})
    stage.run(ask(sampling=sampling))

    assert stage.versions.calls[0][1].sampling.seed == sampling.seed
