"""Real servers for the tests of this folder: one shared by a module, and fresh ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from piccard_server import TRIES, RunningServer, ServerDiedError, make_scripted_home


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server with scripted versions 1 (stable) and 2 (canary at 10 %), shared by a module's tests.

    Its policy is that of a new home but for what the module's POLICY says. Tests that change policy, state or processes
    take `fresh_server`.
    """
    yield from _module_server(tmp_path_factory.mktemp("home"), request)


@pytest.fixture(scope="module")
def _lent_server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    yield from _module_server(tmp_path_factory.mktemp("lent"), request)


def _module_server(home: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    policy: dict[str, Any] = getattr(request.module, "POLICY", {})
    running = RunningServer(make_scripted_home(home, **policy).home)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def policy_server(_lent_server: RunningServer) -> Iterator[RunningServer]:
    """As `server`, shared by a module's tests that change policy.yaml and nothing else; each finds the first one."""
    path = _lent_server.service.policy_file
    first = path.read_text(encoding="utf-8")
    yield _lent_server
    path.write_text(first, encoding="utf-8")


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Makes a server of its own: `fresh_server(versions=2, options=(), **policy)`; it is ended after the test."""
    made: list[RunningServer] = []

    def make(versions: int = 2, options: tuple[str, ...] = (), **policy: Any) -> RunningServer:
        service = make_scripted_home(tmp_path / f"home{len(made)}", versions, **policy)
        running = RunningServer(service.home, *options)
        made.append(running)
        return running.wait_ready()

    yield make
    for running in made:
        running.stop()


# Words in the names of tests that kill a process of the server.
DEADLY = ("dies", "kill", "outlive")


def deadly(item: pytest.Item) -> bool:
    return any(word in item.name for word in DEADLY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder runs a real server.

    A process that is killed with a lock of server 2.51 in its hands takes the whole server along (docs/operations.md),
    which no code of ours can help: tests that kill are begun again then, and for no other reason.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)
            if deadly(item):
                item.add_marker(pytest.mark.flaky(reruns=TRIES - 1, only_rerun=ServerDiedError))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Call a test that kills; a failure while its server went with what it killed says so."""
    if not deadly(pyfuncitem):
        return (yield)
    RunningServer.started[:] = [server for server in RunningServer.started if server.process.poll() is None]
    before = {server: server.lock_exceptions() for server in RunningServer.started}
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if any(server.lock_exceptions() > before.get(server, 0) for server in RunningServer.started):
            raise ServerDiedError(str(error)) from error
        raise
