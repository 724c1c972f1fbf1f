"""What a router does with a request before and beside its stream."""

from collections.abc import Iterator

import pytest
from canary_fakes import Client, Play, Scene
from patience import wait_until
from piccard_canary.cancel import mint_token
from piccard_contract.errors import ErrorCode
from piccard_contract.request import GenerateRequest, RequestExtensions
from piccard_contract.routing import RouteKeys
from piccard_contract.sampling import SamplingParams


@pytest.fixture
def stage() -> Iterator[Scene]:
    made = Scene({1: Play(), 2: Play(hang_at=2)})
    yield made
    made.close()


def ask(**changes: object) -> GenerateRequest:
    settings = {"id": "r", "text": "say", "stream": True, "sampling": SamplingParams(temperature=0)}
    return GenerateRequest.model_validate(settings | changes)


def cancel(stage: Scene, token: str) -> bool:
    client = stage.run(GenerateRequest(id="c", extensions=RequestExtensions(cancel=token)))
    assert client.finals == 1
    assert [choice.text for choice in client.responses[0].choices] == [""]
    told = client.responses[0].details["cancelled"]
    assert isinstance(told, bool)
    return told


def hanging(stage: Scene) -> Client:
    """A stream that waits for the canary's third token."""
    stage.versions.hanging.clear()
    client = stage.start(ask(route=RouteKeys(canary="true")))
    assert stage.versions.hanging.wait(60)
    return client


@pytest.mark.parametrize("admitted", ["", "{}", "[", '{"id": "x", "unknown": 1}', b"\xff"])
def test_what_admission_did_not_write(stage: Scene, admitted: str | bytes) -> None:
    client = Client()
    stage.router.answer(admitted, client)

    assert client.error is not None
    # `{}` has no id, so it is none of admission's either.
    assert client.error.code is ErrorCode.INVALID_JSON


def test_refusals_are_counted_without_the_clients_number(stage: Scene) -> None:
    client = stage.run(ask(route=RouteKeys(version=77)))

    assert client.error is not None
    assert client.error.code is ErrorCode.VERSION_NOT_FOUND
    assert stage.counted("piccard_errors_total", version="none", code="VERSION_NOT_FOUND") == 1
    assert stage.lines[0].code == "VERSION_NOT_FOUND"
    assert stage.router.streams() == []


def test_a_model_that_answers_once_does_not_stream() -> None:
    stage = Scene({1: Play(), 2: Play()}, streams=False)
    client = stage.run(ask())

    assert client.error is not None
    assert client.error.code is ErrorCode.INVALID_VALUE
    assert stage.versions.calls == []


def test_there_is_a_limit(stage: Scene) -> None:
    waiting = [hanging(stage) for _ in range(8)]
    client = stage.run(ask())
    assert client.error is not None
    assert client.error.code is ErrorCode.OVERLOADED
    assert client.error.retry_after is not None
    assert stage.router.in_flight() == {2: 8}

    stage.versions.over.set()
    for one in waiting:
        stage.wait_over(one)
    assert stage.run(ask()).error is None


def test_a_cancel_reaches_the_version(stage: Scene) -> None:
    client = hanging(stage)
    token = client.responses[0].cancel_token
    assert token is not None

    def end(version: int, sent: str) -> bool:
        stage.versions.over.set()
        return True

    stage.versions.cancelled = end
    assert cancel(stage, token)
    assert stage.versions.cancels == [(2, token)]
    stage.wait_over(client)
    assert client.error is not None
    assert client.error.code is ErrorCode.CANCELLED
    assert len(stage.versions.calls) == 1
    assert stage.counted("piccard_cancels_total", version="2") == 1
    assert stage.counted("piccard_errors_total") == 0
    # Once it has ended there is nothing to cancel.
    assert not cancel(stage, token) or stage.versions.cancels[-1] == (2, token)


def test_a_cancel_that_meets_the_last_token_says_that_it_came_too_late() -> None:
    stage = Scene({1: Play(), 2: Play(late_at=2)})
    client = stage.start(ask(route=RouteKeys(canary="true")))
    assert stage.versions.hanging.wait(60)
    token = client.responses[0].cancel_token
    assert token is not None
    # The version says yes, and its last responses are on their way already.
    stage.versions.cancelled = lambda version, sent: stage.versions.over.set() is None

    assert not cancel(stage, token)
    stage.wait_over(client)
    assert client.error is None


def test_a_cancel_of_a_version_that_is_called_no_more_is_posted(stage: Scene) -> None:
    """One that the server unloads runs its last streams, which may be those of another router."""
    token = mint_token(7)
    assert not cancel(stage, token)
    assert stage.posted == [token]
    assert stage.versions.cancels == []
    assert not cancel(stage, "nonsense")
    assert stage.posted == [token]


def test_a_cancel_of_a_stuck_version_ends_the_request_too(stage: Scene) -> None:
    client = hanging(stage)
    token = client.responses[0].cancel_token
    assert token is not None
    # Time passes only where the router asks the version, which never answers.
    stage.versions.cancelled = lambda version, sent: bool(setattr(stage.clock, "now", stage.clock.now + 1.1))
    assert cancel(stage, token)

    stage.watchdog.look()
    stage.wait_over(client)
    assert client.error is not None
    assert client.error.code is ErrorCode.CANCELLED


def test_the_token_of_an_earlier_attempt_cancels_the_present_one() -> None:
    stage = Scene({1: Play(hang_at=3), 2: Play(fail_at=1)})
    client = stage.start(ask(route=RouteKeys(canary="true")))
    assert stage.versions.hanging.wait(60)
    first, present = client.responses[0].cancel_token, client.responses[-1].cancel_token
    assert first is not None
    assert first != present

    stage.versions.cancelled = lambda version, sent: stage.versions.over.set() is None
    assert cancel(stage, first)
    assert stage.versions.cancels == [(1, present)]
    stage.wait_over(client)


def test_tokens_of_other_processes_are_sent_to_their_version(stage: Scene) -> None:
    stage.versions.cancelled = lambda version, token: token.endswith("known" * 4)

    assert cancel(stage, "1." + "known" * 4)
    assert not cancel(stage, "1." + "other" * 4)
    assert not cancel(stage, "9." + "known" * 4)
    assert not cancel(stage, "no token")
    assert [version for version, _ in stage.versions.cancels] == [1, 1]


def test_a_line_tells_all_but_the_text(stage: Scene) -> None:
    stage.run(ask(text="secret words", sampling=SamplingParams(temperature=0, max_tokens=4)))
    line = stage.lines[0]

    assert (line.id, line.version, line.reason, line.code) == ("r", 1, "ratio", "OK")
    assert (line.prompt_tokens, line.completion_tokens, line.finish_reasons) == (7, 4, ["stop"])
    assert line.first_token_s is not None
    assert "secret" not in repr(line)
    assert "<100" not in repr(line)


def test_the_watchdog_looks_by_itself() -> None:
    stage = Scene({1: Play(), 2: Play(hang_at=1)})
    stage.watchdog.start()
    client = hanging(stage)
    stage.watchdog.wake()
    stage.processes[2] = None

    stage.wait_over(client)
    assert client.error is None
    stage.watchdog.stop()
    stage.close()


def test_a_failing_look_does_not_end_the_watchdog() -> None:
    stage = Scene({1: Play(), 2: Play(hang_at=1)})
    client = hanging(stage)
    del stage.processes[2]
    stage.watchdog.start()
    stage.watchdog.wake()
    wait_until(lambda: stage.logged)
    stage.processes[2] = None

    stage.wait_over(client)
    stage.watchdog.stop()
    stage.close()
