"""Keys and limits at the gateway's door."""

from pathlib import Path

import pytest
from gateway_fakes import FakeGateway, FakeGenerator, make_gateway
from piccard.errors import OperationError
from piccard.gateway_keys import add_key, list_keys, revoke_key
from piccard_contract.claims import OWN_TENANT
from piccard_contract.request import GatewayClaims
from piccard_gateway.rate import Rate

PATH = "/v1/completions"
BODY = {"model": "deepseek", "prompt": "a b"}


def ask(gateway: FakeGateway, key: str = "", **headers: str) -> int:
    shown = {"Authorization": f"Bearer {key}"} if key else {}
    return gateway.post(PATH, BODY, **shown, **headers).status_code


def test_without_keys_everybody_comes_in(gateway: FakeGateway) -> None:
    assert ask(gateway) == 200


def test_with_keys_only_who_has_one(gateway: FakeGateway) -> None:
    key = add_key(gateway.service.home, "me", tenant="us", priority=3)
    assert ask(gateway) == 401
    assert ask(gateway, "nonsense") == 401
    assert ask(gateway, key[:-1] + ("a" if key[-1] != "a" else "b")) == 401
    assert ask(gateway, key, X_Priority="-50") == 200
    assert gateway.get("/health").status_code == 200
    assert gateway.get("/v1/models").status_code == 401
    claims = GatewayClaims.model_validate(gateway.generator.asked[-1].extensions["gateway"])
    assert (claims.tenant, claims.priority) == ("us", 3)


def test_the_file_holds_no_key_and_is_the_owner_s(gateway: FakeGateway) -> None:
    key = add_key(gateway.service.home, "me")
    path = gateway.service.gateway_keys
    assert key.rsplit("-", 1)[1] not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert [record["name"] for record in list_keys(gateway.service.home)] == ["me"]


def test_a_revoked_key_opens_nothing_and_leaves_the_door_shut(gateway: FakeGateway) -> None:
    key = add_key(gateway.service.home, "me")
    assert ask(gateway, key) == 200
    revoke_key(gateway.service.home, key.split("-")[1])
    assert ask(gateway, key) == 401
    assert ask(gateway) == 401


def test_a_broken_file_keeps_the_door_shut(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path, FakeGenerator())
    gateway.service.gateway_keys.write_text("{")
    assert ask(gateway) == 401


def test_a_key_of_one_service_asks_no_other(gateway: FakeGateway) -> None:
    key = add_key(gateway.service.home, "me", services=["other"])
    assert ask(gateway, key) == 403
    models = gateway.get("/v1/models", Authorization=f"Bearer {key}").json()
    assert models["data"] == []


def test_a_key_that_is_used_too_often(gateway: FakeGateway) -> None:
    key = add_key(gateway.service.home, "me", rate=2)
    assert [ask(gateway, key) for _ in range(3)] == [200, 200, 429]
    answer = gateway.post(PATH, BODY, Authorization=f"Bearer {key}")
    assert 1 <= int(answer.headers["retry-after"]) <= 30


def test_a_rate_fills_evenly() -> None:
    now = [0.0]
    rate = Rate(60, lambda: now[0])
    assert [rate.take() for _ in range(60)] == [0.0] * 60
    assert rate.take() == pytest.approx(1.0)
    now[0] = 1.0
    assert rate.take() == 0.0


def test_limits(gateway: FakeGateway) -> None:
    gateway.service.gateway_file.write_text("limits: {body_bytes: 1024, header_bytes: 2048}")
    answer = gateway.post(PATH, {**BODY, "prompt": "x" * 2000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert ask(gateway, X_Long="y" * 3000) == 431
    assert ask(gateway) == 200
    gateway.service.gateway_file.write_text("limits: {body_byte: 1}")
    assert ask(gateway) == 200


@pytest.mark.parametrize("headers", [{"X_Request_Id": "x" * 300}, {"X_Priority": "high"}, {"X_Session_Id": "s" * 2000}])
def test_headers_that_cannot_be_passed_on(gateway: FakeGateway, headers: dict[str, str]) -> None:
    assert ask(gateway, **headers) == 400


def test_no_key_speaks_for_the_service_itself(gateway: FakeGateway) -> None:
    for fields in ({"name": "me", "tenant": OWN_TENANT}, {"name": OWN_TENANT, "tenant": OWN_TENANT}):
        with pytest.raises(OperationError, match="the service itself") as refused:
            add_key(gateway.service.home, **fields)
        assert refused.value.exit_code == 2
    # Nor one that somebody wrote into the file: it is not read, and the keys before count.
    key = add_key(gateway.service.home, "me", tenant="us")
    assert ask(gateway, key) == 200
    path = gateway.service.gateway_keys
    path.write_text(path.read_text().replace('"us"', f'"{OWN_TENANT}"'))
    assert ask(gateway, key) == 200
    assert gateway.generator.asked[-1].extensions["gateway"]["tenant"] == "us"
