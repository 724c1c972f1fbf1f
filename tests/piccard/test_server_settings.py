"""tritonserver's arguments: local, restricted by the key, and only named headers forwarded."""

import re
from pathlib import Path

import pytest
from piccard.server_settings import ServerSettings, header_pattern, server_arguments
from piccard.triton_binary import find_triton, python_version, server_environment, shared_libpython
from piccard_contract.home import Service


@pytest.mark.parametrize("name", ["x-canary", "x-session-id", "x-request-id", "x-user", "traceparent", "x-beta"])
def test_headers_that_pass(name: str) -> None:
    assert re.search(header_pattern(["X-Beta"]), name)


@pytest.mark.parametrize("name", ["timeout", "priority", "triton_x", "x-canary-2", "ax-canary", "authorization", ""])
def test_headers_that_do_not(name: str) -> None:
    assert not re.search(header_pattern(["X-Beta"]), name)


def test_arguments_restrict_what_controls_the_server() -> None:
    home = Path("/home/of/it")
    arguments = server_arguments(
        ServerSettings(),
        [Service(home), Service(home, "other")],
        repository=home / "model_repository",
        backends=Path("/backends"),
        region_prefix="piccard_x_",
        admin_key="secret",
        headers="^x$",
    )
    restricted = "model-repository,shared-memory,trace,logging:admin-key=secret"
    for expected in (
        "--model-control-mode=explicit",
        "--exit-on-error=false",
        f"--grpc-restricted-protocol={restricted}",
        f"--http-restricted-api={restricted}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        "--backend-config=python,shm-region-prefix-name=piccard_x_",
        "--load-model=deepseek_llm",
        "--load-model=other_unary",
    ):
        assert expected in arguments


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("box", "box")]
)
def test_address_on_this_machine(host: str, local: str) -> None:
    assert ServerSettings(host=host).local_host == local


def test_environment_puts_this_python_first() -> None:
    import sys

    install = find_triton()
    assert install is not None
    environment = server_environment(install)
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    library = shared_libpython()
    assert library is not None
    assert python_version() in library.name
    assert str(library.parent) in environment["LD_LIBRARY_PATH"] or install.libraries is None
