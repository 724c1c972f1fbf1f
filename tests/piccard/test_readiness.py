"""What /readyz makes of a service's answer."""

from typing import Any

import pytest
from piccard.keys import make_secret, own_claims, read_secret
from piccard.probe import Answer, ProbeError
from piccard.readiness import Readiness
from piccard_contract.claims import OWN_TENANT, ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.home import Service

ENSEMBLE = "in ensemble 'deepseek', "


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The questions so far; they are answered by version 1."""
    questions: list[dict[str, Any]] = []

    def generate_once(address: str, model: str, prompt: str, tokens: int, timeout: float, **options: Any) -> Answer:
        questions.append({"model": model, **options})
        return Answer("a", [7], {"code": "OK"}, served_version=1)

    monkeypatch.setattr("piccard.readiness.generate_once", generate_once)
    return questions


def refuse(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    def generate_once(*_: Any, **__: Any) -> Answer:
        raise ProbeError(told)

    monkeypatch.setattr("piccard.readiness.generate_once", generate_once)


def test_a_token_of_stable_in_the_services_own_name(service: Service, asked: list[dict[str, Any]]) -> None:
    make_secret(service.gateway_secret)
    good, body = Readiness("here").of(service, 5.0)
    assert good
    assert (body["ready"], body["version"]) == (True, 1)
    (question,) = asked
    assert (question["model"], question["parameters"]) == ("deepseek", {"x-canary": "false"})
    assert question["claims"].tenant == OWN_TENANT
    assert ClaimsCheck(service.gateway_secret).believed(question["claims"]) is not None


def test_each_question_is_signed_with_the_secret_of_now(service: Service, asked: list[dict[str, Any]]) -> None:
    readiness = Readiness("here")
    for _ in range(2):
        make_secret(service.gateway_secret)
        readiness.of(service, 5.0)
        assert asked[-1]["claims"].signed_by(read_secret(service.gateway_secret).encode())


@pytest.mark.parametrize("secret", [None, ""])
def test_without_a_secret_nobody_signs(service: Service, secret: str | None) -> None:
    service.gateway_secret.unlink(missing_ok=True)
    if secret is not None:
        service.gateway_secret.parent.mkdir(parents=True, exist_ok=True)
        service.gateway_secret.write_text(secret)
    assert own_claims(service) is None


def test_a_version_that_is_full_is_ready_and_says_why(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    full = RequestError(ErrorCode.OVERLOADED, "64 sequences wait already", retry_after=2.5, version=1)
    refuse(monkeypatch, ENSEMBLE + full.head())
    good, body = Readiness("here").of(service, 5.0)
    assert good
    assert (body["ready"], body["version"], body["reason"]) == (True, 1, full.head())


@pytest.mark.parametrize(
    "told",
    [
        # The router itself, whose threads may hang on dead versions.
        RequestError(ErrorCode.OVERLOADED, "2048 requests are in flight", retry_after=1.0).head(),
        RequestError(ErrorCode.OUT_OF_MEMORY, "no memory", version=1).head(),
        RequestError(ErrorCode.DEADLINE_EXCEEDED, "OVERLOADED version=1", version=1).head(),
        RequestError(ErrorCode.UNAVAILABLE, "stable version 1 is not ready").head(),
        "no complete answer within 5 s",
        "no connection to here",
    ],
)
def test_nothing_else_is(service: Service, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    refuse(monkeypatch, told)
    assert Readiness("here").of(service, 5.0) == (False, {"ready": False, "reason": told})
