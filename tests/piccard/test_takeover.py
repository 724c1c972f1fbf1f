"""A server that runs is found by its command line, told from others, and adopted as it is."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import wait_until
from piccard.doctor import findings
from piccard.found_server import FoundServer, find_server, leftover_stubs, server_of
from piccard.operation import Operation
from piccard.server_process import AdoptedServer, ServerProcess
from piccard.server_settings import ServerSettings, server_arguments, settings_of
from piccard.shared_memory import server_prefix
from piccard.state_store import StateStore
from piccard.status import status
from piccard.takeover import Beginning, beginning, differing_options, last_reports
from piccard.triton_binary import STUB_NAME
from piccard_contract.home import Service
from piccard_contract.live_state import LiveState
from piccard_contract.reports import SupervisorReport

SLEEP = "import time; time.sleep(600)"
ports = st.integers(1, 65535)
settings = st.builds(
    ServerSettings,
    host=st.sampled_from(["127.0.0.1", "0.0.0.0", "::", "box.example"]),
    http_port=ports,
    grpc_port=ports,
    metrics_port=ports,
    exit_timeout=st.integers(0, 3600),
    verbose=st.booleans(),
)


def arguments_of(home: Path, found: ServerSettings = ServerSettings()) -> list[str]:  # noqa: B008
    return [
        "/opt/tritonserver/bin/tritonserver",
        *server_arguments(
            found,
            [Service(home)],
            repository=home / "model_repository",
            backends=Path("/backends"),
            region_prefix=server_prefix(home, 77),
            admin_key="secret=with=signs",
            headers="^(x-canary|a=b)$",
        ),
    ]


@pytest.fixture
def server(service: Service) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that looks like the home's server, with another of its group that outlives it."""
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
    process = subprocess.Popen(
        ["tritonserver", "-c", child, *arguments_of(service.home)[1:]],
        executable=sys.executable,
        start_new_session=True,
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@given(settings)
def test_settings_are_read_back_from_the_command_line(given_settings: ServerSettings) -> None:
    assert settings_of(arguments_of(Path("/home/of/it"), given_settings)) == given_settings


@pytest.mark.parametrize("missing", ["--http-port", "--grpc-port", "--exit-timeout-secs"])
def test_a_command_line_that_is_none_of_ours_is_no_server(missing: str) -> None:
    home = Path("/home/of/it")
    arguments = arguments_of(home)
    assert server_of(1, arguments, home / "model_repository") is not None
    assert server_of(1, [a for a in arguments if not a.startswith(missing)], home / "model_repository") is None
    assert server_of(1, ["/bin/less", *arguments[1:]], home / "model_repository") is None
    assert server_of(1, arguments, Path("/home/of/another/model_repository")) is None
    assert server_of(1, [], home / "model_repository") is None


def test_the_home_may_be_named_in_another_way(service: Service, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(service.home)
    assert server_of(1, arguments_of(link), service.repository) is not None


def test_the_server_of_a_home_is_found_and_ended_with_what_it_started(
    service: Service, server: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    wait_until(lambda: find_server(service.home) is not None)
    found = find_server(service.home)
    assert found is not None
    assert (found.pid, found.region_prefix) == (server.pid, server_prefix(service.home, 77))
    assert find_server(tmp_path) is None

    adopted = AdoptedServer(found)
    assert adopted.running
    # It is this process's child only in the test: the adopter waits without being its parent.
    assert adopted.stop(grace=30.0) is None
    assert not adopted.running
    server.wait()
    wait_until(lambda: not _group_lives(server.pid))
    assert find_server(service.home) is None
    with pytest.raises(ProcessLookupError):
        AdoptedServer(found)


def test_a_server_of_our_own_goes_on_where_nobody_stops_it(service: Service, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEP]
    process = ServerProcess(command, dict(os.environ), tmp_path, tmp_path / "log", "piccard_none_")
    assert (process.pid, process.running, process.stop(0)) == (0, False, None)
    process.start()
    # Its own session: what a terminal or a supervisor's end sends does not reach it.
    assert os.getsid(process.pid) == process.pid
    assert process.stop(grace=30.0) == -signal.SIGTERM


def test_stubs_of_a_home_are_told_from_those_of_others(service: Service, tmp_path: Path) -> None:
    stubs = [
        subprocess.Popen([STUB_NAME, "-c", SLEEP, f"{server_prefix(home, 77)}3"], executable=sys.executable)
        for home in (service.home, tmp_path / "other")
    ]
    try:
        wait_until(lambda: leftover_stubs(service.home) == [stubs[0].pid])
    finally:
        for stub in stubs:
            stub.kill()
            stub.wait()


def found_with(pid: int) -> FoundServer:
    return FoundServer(pid, ServerSettings(), "piccard_x_")


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["starting", "serving", "stopping"]))))
def test_only_a_server_whose_end_was_begun_is_ended(pid: int, last: list[tuple[int, str]]) -> None:
    reports = [SupervisorReport(server_pid=server, details={"phase": phase}) for server, phase in last]
    ended = (pid, "stopping") in last
    assert beginning(found_with(pid), reports) is (Beginning.END_AND_START if ended else Beginning.TAKE_OVER)
    assert beginning(None, reports) is Beginning.START


def test_what_the_last_supervisor_published_is_read_without_it(service: Service) -> None:
    assert last_reports([service]) == []
    live = LiveState(service.live_state, service.run_folder)
    live.writer("supervisor").publish(SupervisorReport(server_pid=7, details={"phase": "stopping"}).model_dump())
    live.close()
    assert [(report.server_pid, report.details["phase"]) for report in last_reports([service])] == [(7, "stopping")]


def test_options_that_wait_for_the_next_start_are_told() -> None:
    asked = ServerSettings(host="0.0.0.0", grpc_port=9001, health_port=9003, exit_timeout=5)
    assert differing_options(asked, ServerSettings()) == ["--grpc-port=9001", "--host=0.0.0.0", "--exit-timeout=5"]
    assert differing_options(ServerSettings(health_port=9003), ServerSettings()) == []


def test_status_and_doctor_tell_of_a_server_that_nobody_looks_after(
    service: Service, server: "subprocess.Popen[bytes]"
) -> None:
    op = Operation(service, StateStore(service), None, dry_run=True, tell=print)
    wait_until(lambda: find_server(service.home) is not None)
    told = status(op)["server"]
    assert (told["pid"], told["phase"], told["grpc"]) == (server.pid, "unsupervised", "127.0.0.1:8001")
    assert "supervisor" in {finding.trap for finding in findings(op)}


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
