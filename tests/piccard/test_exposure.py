"""What other machines can reach is refused unless it was meant."""

import pytest
from piccard.errors import OperationError
from piccard.exposure import check_exposure
from piccard.gateway_keys import add_key, revoke_key
from piccard.server_settings import ServerSettings, is_loopback
from piccard_contract.home import Service

OPEN = ("0.0.0.0", "::", "192.0.2.1", "box.example")


def check(service: Service, *, open_ports: bool = False, no_keys: bool = False, **settings: object) -> None:
    asked = ServerSettings(**settings)  # type: ignore[arg-type]
    check_exposure(service.home, asked, open_ports=open_ports, no_keys=no_keys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_the_loopback_is_open_to_this_machine_alone(service: Service, host: str) -> None:
    assert is_loopback(host)
    check(service, host=host, gateway_host=host, gateway_port=8004)


@pytest.mark.parametrize("host", OPEN)
def test_tritons_own_ports_are_refused_elsewhere(service: Service, host: str) -> None:
    with pytest.raises(OperationError, match="--allow-open-ports"):
        check(service, host=host)
    check(service, host=host, open_ports=True)


@pytest.mark.parametrize("host", OPEN)
def test_a_gateway_without_keys_is_refused_elsewhere(service: Service, host: str) -> None:
    with pytest.raises(OperationError, match="piccard key add"):
        check(service, gateway_host=host, gateway_port=8004)
    check(service, gateway_host=host, gateway_port=8004, no_keys=True)
    check(service, gateway_host=host)
    key = add_key(service.home, "me")
    check(service, gateway_host=host, gateway_port=8004)
    revoke_key(service.home, key.split("-")[1])
    check(service, gateway_host=host, gateway_port=8004)
