"""A version believes a tenant and a priority only where the gateway vouched for them."""

from pathlib import Path
from typing import Any

import pytest
from deepseek_engine.tenants import Tenants
from piccard_contract.claims import ClaimsCheck
from piccard_contract.request import Attempt, GatewayClaims, GenerateRequest, RequestExtensions

SIGNED = GatewayClaims(tenant="acme", priority=3).sign(b"one")


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    secret = tmp_path / "gateway.secret"
    secret.write_bytes(b"one\n")
    return Tenants(ClaimsCheck(secret))


def told(kind: str, **changes: Any) -> GenerateRequest:
    """A request with the signed claims, changed: as the gateway sends them, or as a router passes them on."""
    claims = SIGNED.model_copy(update=changes)
    if kind == "gateway":
        return GenerateRequest(id="a", text="b", extensions=RequestExtensions(gateway=claims))
    attempt = Attempt(cancel_token="3.token", router="router", process=7, **claims.model_dump())
    return GenerateRequest(id="a", text="b", extensions=RequestExtensions(attempt=attempt))


@pytest.mark.parametrize("kind", ["gateway", "attempt"])
def test_signed_claims_are_believed(tenants: Tenants, kind: str) -> None:
    request = told(kind)
    assert tenants.settle(request) is request
    assert tenants.ignored == 0


@pytest.mark.parametrize("wrong", [{"signature": ""}, {"signature": "0" * 64}, {"tenant": "other"}, {"priority": 99}])
def test_other_claims_are_taken_away_and_counted(tenants: Tenants, wrong: dict[str, Any]) -> None:
    assert tenants.settle(told("gateway", **wrong)).extensions.gateway is None
    attempt = tenants.settle(told("attempt", **wrong)).extensions.attempt
    assert attempt is not None
    assert (attempt.tenant, attempt.priority) == ("", 0)
    # Who waits for the answer is still known.
    assert (attempt.cancel_token, attempt.router, attempt.process) == ("3.token", "router", 7)
    assert tenants.ignored == 2


def test_a_router_without_claims_forges_none(tenants: Tenants) -> None:
    tenants.settle(told("attempt", tenant="", priority=0, signature=""))
    tenants.settle(GenerateRequest(id="a", text="b"))
    assert tenants.ignored == 0


def test_without_a_secret_nothing_is_believed(tmp_path: Path) -> None:
    tenants = Tenants(ClaimsCheck(tmp_path / "none"))
    assert tenants.settle(told("gateway")).extensions.gateway is None
    assert tenants.ignored == 1
