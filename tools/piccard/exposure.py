"""What other machines can reach, which is refused unless it was meant."""

from pathlib import Path

from piccard_contract.home import Service

from piccard.errors import OperationError
from piccard.server_settings import ServerSettings, is_loopback


def check_exposure(home: Path, settings: ServerSettings, *, open_ports: bool, no_keys: bool) -> None:
    """Look at the addresses before anything listens.

    Args:
        open_ports: Triton's own ports are meant to be open.
        no_keys: the gateway is meant to be open to everybody.

    Raises:
        OperationError: an address is not of the loopback, and nobody said that it may be.
    """
    if not is_loopback(settings.host) and not open_ports:
        raise OperationError(
            f"--host={settings.host[:60]} opens Triton's own ports to other machines, where nobody is asked for "
            "a key and a hostile body ends the server; open the gateway instead (--gateway-host), "
            "or add --allow-open-ports"
        )
    if settings.gateway_port is None or is_loopback(settings.gateway_host) or no_keys:
        return
    if not Service(home.absolute()).gateway_keys.is_file():
        raise OperationError(
            f"--gateway-host={settings.gateway_host[:60]} opens the gateway to other machines and there are no "
            "keys; make one with `piccard key add NAME`, or add --allow-no-keys"
        )
