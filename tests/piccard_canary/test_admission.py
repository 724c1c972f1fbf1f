"""What admission lets through."""

import json
from pathlib import Path
from typing import Any

import pytest
from piccard_canary.admission import Admission
from piccard_canary.counters import Counters
from piccard_canary.token_cost import Outlook
from piccard_canary.token_limits import TokenLimits
from piccard_contract.claims import OWN_TENANT, ClaimsCheck
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.policy import AdmissionLimits, Policy, TokenLimit
from piccard_contract.request import Charge, GatewayClaims, GenerateRequest, request_inputs


class Desk:
    """Admission with a policy and a gateway's secret."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        (folder / "secret").write_bytes(b"key")
        self.counters = Counters("deepseek", "admission")
        policy = policy or Policy()
        limits = TokenLimits(lambda: policy.admission, lambda: Outlook(load=1.0), self.counters)
        self.admission = Admission(lambda: policy, ClaimsCheck(folder / "secret"), self.counters, limits)

    def admit(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> GenerateRequest:
        tensors = {name: [value] for name, value in inputs.items()}
        return GenerateRequest.model_validate_json(self.admission.admit(tensors, parameters or {}, "made"))


def test_an_admitted_request_is_complete(tmp_path: Path) -> None:
    request = Desk(tmp_path).admit({"x-canary": "true", "max_tokens": 3}, text_input=b"a", stream=True)

    assert (request.id, request.text, request.stream, request.route.canary) == ("made", "a", True, "true")
    assert request.sampling.max_tokens == 3


def test_the_policys_headers_are_read(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Policy(header="X-Lane", sticky_keys=["X-Team"]))

    request = desk.admit({"x-lane": "false", "X-TEAM": "red", "x-session-id": "7"}, text_input=b"a")
    assert request.route.canary == "false"
    assert request.route.sticky == "x-team:red"


def test_refusals_are_counted_by_code(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for inputs in ({}, {}, {"text_input": b"a", "extensions": b"{"}):
        with pytest.raises(RequestError):
            desk.admit(**inputs)

    counted = {labels["code"]: value for name, labels, value in desk.counters.samples() if "refusals" in name}
    assert counted == {"MISSING_INPUT": 2, "INVALID_JSON": 1}


def test_only_the_router_sets_an_attempt(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refusal:
        Desk(tmp_path).admit(text_input=b"a", extensions=b'{"attempt": {"cancel_token": "1.x"}}')

    assert refusal.value.code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize(("secret", "believed"), [(b"key", True), (b"other", False), (None, False)])
def test_claims_need_the_gateways_signature(tmp_path: Path, secret: bytes | None, believed: bool) -> None:
    desk = Desk(tmp_path)
    claims = GatewayClaims(tenant="acme", priority=5)
    signed = claims.sign(secret) if secret else claims
    extensions = json.dumps({"gateway": signed.model_dump()})
    request = desk.admit(text_input=b"a", extensions=extensions.encode())

    assert request.extensions.gateway == (signed if believed else None)
    ignored = sum(value for name, _, value in desk.counters.samples() if "unsigned" in name)
    assert ignored == (0 if believed else 1)


def test_a_defect_is_counted_too(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with pytest.raises(TypeError):
        desk.admission.admit({"text_input": None}, None, "made")  # type: ignore[arg-type,dict-item]

    assert [labels["code"] for name, labels, _ in desk.counters.samples()] == ["INTERNAL"]


def test_what_is_too_large_is_refused_by_its_size_and_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.admission.measure({"input_ids": 8})
    with pytest.raises(RequestError, match="REQUEST_TOO_LARGE"):
        desk.admission.measure({"input_ids": 2**30})
    assert (
        "piccard_refusals_total",
        {"service": "deepseek", "code": "REQUEST_TOO_LARGE"},
        1.0,
    ) in desk.counters.samples()


LIMITED = Policy(admission=AdmissionLimits(each=TokenLimit(tokens_per_second=1, burst=100)))


def asking(tenant: str, secret: bytes = b"key") -> bytes:
    """Extensions with the tenant's claims."""
    return json.dumps({"gateway": GatewayClaims(tenant=tenant).sign(secret).model_dump()}).encode()


def test_a_charge_goes_along_and_is_told_no_version(tmp_path: Path) -> None:
    request = Desk(tmp_path, LIMITED).admit({"max_tokens": 30}, text_input=b"a" * 40)

    assert request.charge == Charge(tokens=40, prompt=10)
    assert "charge" not in json.dumps(request_inputs(request))


def test_nothing_is_charged_without_limits(tmp_path: Path) -> None:
    """So that a router of before, which knows no charge, can read it."""
    assert "charge" not in Desk(tmp_path).admission.admit({"text_input": [b"a"]}, {}, "made")


def test_tenants_are_those_that_the_gateway_vouched_for(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LIMITED)
    desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking("acme"))
    with pytest.raises(RequestError) as refusal:
        desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking("acme"))
    assert (refusal.value.code, refusal.value.retry_after) == (ErrorCode.OVERLOADED, 125.0)
    desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking("other"))
    # All whom nobody vouched for are one tenant, whatever they say.
    desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking("forged", b"another"))
    for tenant in ("forged", "more"):
        with pytest.raises(RequestError, match="OVERLOADED"):
            desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking(tenant, b"another"))


def test_the_service_itself_is_neither_refused_nor_charged(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LIMITED)
    for _ in range(5):
        request = desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking(OWN_TENANT))
        assert request.charge is None
    desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking(OWN_TENANT, b"another"))
    with pytest.raises(RequestError, match="OVERLOADED"):
        desk.admit({"max_tokens": 99}, text_input=b"a", extensions=asking(OWN_TENANT, b"another"))


def test_a_cancel_costs_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LIMITED)
    desk.admit({"max_tokens": 99}, text_input=b"a")
    assert desk.admit(extensions=b'{"cancel": "1.x"}').extensions.cancel == "1.x"


def test_what_cannot_be_read_costs_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, LIMITED)
    with pytest.raises(RequestError, match="UNKNOWN_PARAMETER"):
        desk.admit({"max_tokens": 99, "typo": 1}, text_input=b"a")
    desk.admit({"max_tokens": 99}, text_input=b"a")
