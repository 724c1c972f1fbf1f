"""Every process of a running server is killed: what clients see, what goes on, and what comes back."""

import os
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest
from piccard.doctor import findings
from piccard.operation import operation
from piccard.status import status
from piccard_contract.errors import ErrorCode, parse_error
from piccard_contract.home import version_owner
from piccard_contract.lifecycle import VersionState
from piccard_server import RunningServer, runs, wait_for
from running_stream import RunningStream
from short_calls import answers, answers_unary

FreshServer = Callable[..., RunningServer]

PATIENCE = 120.0

# Several deaths a test, each with a start of a process.
pytestmark = pytest.mark.timeout(900)

# Tokens are far between: a version that is killed while it sends can take this server with it (docs/operations.md).
DELAY = 0.4
TOKENS = 20
WORDS = " ".join(f"w{n}" for n in range(TOKENS))
# Of version 1, so that no stream is over before all have begun; no deadline strikes meanwhile.
WAITS = {"versions": {"1": {"hang_at": 3}}}
NEVER = {"first_token": 600.0, "between_tokens": 600.0}


def start_streams(
    server: RunningServer, count: int, *, canary: str = "", script: dict[str, Any] | None = None
) -> list[RunningStream]:
    """Streams that repeat the words of their prompt, all of them past their first token."""
    streams = [
        RunningStream(
            server.grpc,
            server.service.ensemble,
            headers={"x-canary": canary} if canary else None,
            timeout=PATIENCE,
            text_input=WORDS,
            sampling_parameters={"max_tokens": TOKENS},
            extensions={"script": {"tokens": TOKENS, "delay_s": DELAY, **(script or {})}},
        )
        for _ in range(count)
    ]
    for stream in streams:
        stream.wait_first(PATIENCE)
    return streams


def assert_whole(stream: RunningStream, versions: set[int]) -> None:
    stream.wait()
    assert stream.error is None, stream.error
    assert stream.status == "OK"
    assert stream.text.split() == WORDS.split()
    assert stream.versions == versions


def kill(server: RunningServer, owner: str) -> int:
    pid = server.pid(owner)
    os.kill(pid, signal.SIGKILL)
    return pid


def revived(server: RunningServer, version: int, old: int) -> bool:
    return server.version_ready(version) and server.pid(version_owner(version)) != old


def births(server: RunningServer) -> dict[str, tuple[int, float]]:
    """Process id and start of everything that serves."""
    found = {}
    for owner in ("admission", "router", "router_unary"):
        found[owner] = (server.pid(owner), 0.0)
    for number in (1, 2):
        owner = version_owner(number)
        found[owner] = (server.pid(owner), server.report(owner)["started_at"])
    return found


def told_of_server(server: RunningServer) -> dict[str, Any]:
    """What `piccard status` says of the server."""
    with operation(server.home, server.service.name, dry_run=True) as op:
        found: dict[str, Any] = status(op)["server"]
    return found


def traps_of_deaths(server: RunningServer) -> list[str]:
    """What `piccard doctor` finds that has to do with what is dead."""
    with operation(server.home, server.service.name, dry_run=True) as op:
        found = [finding.trap for finding in findings(op)]
    return sorted(trap for trap in found if trap in ("supervisor", "process", "index", "shared-memory", "interrupted"))


def given_up(server: RunningServer) -> dict[str, str]:
    """What /readyz tells of processes that nobody starts any more."""
    _, body = server.get("readyz")
    found: dict[str, str] = (body or {}).get("given_up", {})
    return found


def break_version(server: RunningServer, version: int) -> str:
    """Make a version that cannot be loaded again; returns what mends it."""
    path = server.service.version_folder(version) / "version.yaml"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace("schema: 1", "schema: 7"), encoding="utf-8")
    return whole


def mend_version(server: RunningServer, version: int, whole: str) -> None:
    (server.service.version_folder(version) / "version.yaml").write_text(whole, encoding="utf-8")


def test_the_only_version_dies_and_its_clients_are_told(fresh_server: FreshServer) -> None:
    server = fresh_server(versions=1, deadlines=NEVER)
    streams = start_streams(server, 4, script=WAITS)
    old = kill(server, version_owner(1))

    for stream in streams:
        stream.wait()
        error = parse_error(str(stream.error))
        assert error is not None, stream.error
        assert error.code is ErrorCode.VERSION_DIED
        assert error.version == 1
    wait_for(lambda: revived(server, 1, old), PATIENCE, "version 1")
    wait_for(lambda: answers(server), PATIENCE, "an answer")
    wait_for(lambda: answers_unary(server), PATIENCE, "an answer to a unary call")


def test_stable_dies_and_another_version_goes_on(fresh_server: FreshServer) -> None:
    server = fresh_server(traffic_ratio=0.0, fallback_policy="both", deadlines=NEVER)
    streams = start_streams(server, 8, script=WAITS)
    old = kill(server, version_owner(1))

    for stream in streams:
        assert_whole(stream, {1, 2})
    wait_for(lambda: revived(server, 1, old), PATIENCE, "version 1")
    wait_for(lambda: answers(server), PATIENCE, "an answer of stable")


def test_the_server_outlives_its_supervisor_and_is_taken_over(fresh_server: FreshServer) -> None:
    server = fresh_server()
    before, pid = births(server), server.server_pid()
    streams = start_streams(server, 2)
    server.kill_supervisor()

    # What runs is served and told as it is.
    wait_for(lambda: answers(server) and answers_unary(server), PATIENCE, "answers without a supervisor")
    told = told_of_server(server)
    assert (told["phase"], told["pid"], told["grpc"]) == ("unsupervised", pid, server.grpc)
    assert traps_of_deaths(server) == ["supervisor"]
    server.piccard("publish", "scripted", "--runner=scripted", "--label=v9", "--linked")

    server.serve_again()
    server.wait_ready()
    for stream in streams:
        stream.wait()
        assert stream.text.split() == WORDS.split()
    assert births(server) == before
    assert server.server_pid() == pid
    wait_for(lambda: told_of_server(server)["phase"] == "serving", PATIENCE, "the report of who took over")
    wait_for(lambda: traps_of_deaths(server) == [], PATIENCE, "a doctor that finds nothing")
    assert server.state().versions[3].state is VersionState.READY

    # What dies while there is no supervisor waits for the next.
    server.kill_supervisor()
    dead = {owner: kill(server, owner) for owner in (version_owner(2), "router_unary")}
    traps = ["process", "process", "supervisor"]
    wait_for(lambda: traps_of_deaths(server) == traps, PATIENCE, "what doctor finds")
    wait_for(lambda: answers(server), PATIENCE, "an answer of stable")
    server.serve_again()
    wait_for(lambda: revived(server, 2, dead[version_owner(2)]), PATIENCE, "version 2")
    wait_for(lambda: answers_unary(server), PATIENCE, "the unary router")
    server.wait_ready()
    for owner in (version_owner(1), "router", "admission"):
        assert server.pid(owner) == before[owner][0]
    everything = server.processes()
    assert server.stop() == 0
    assert not [process for process in everything if runs(process)]


def test_nothing_of_a_dead_server_outlives_it(fresh_server: FreshServer) -> None:
    server = fresh_server()
    old = server.processes()
    os.kill(old[0], signal.SIGKILL)

    wait_for(lambda: server.server_pid() not in (0, old[0]), PATIENCE, "another server")
    assert "tritonserver ended by itself" in server.printed()
    wait_for(lambda: not [pid for pid in old if runs(pid)], PATIENCE, "the end of what the dead one started")
    server.wait_ready()
    wait_for(lambda: answers(server), PATIENCE, "an answer")


def test_an_engine_that_breaks_or_hangs_dies_and_its_streams_are_resumed(fresh_server: FreshServer) -> None:
    server = fresh_server(deadlines={"step": 5.0, "between_tokens": 600.0})
    old = server.pid(version_owner(2))
    # Those that began before wait at the canary until it dies.
    streams = start_streams(server, 3, canary="true", script={"versions": {"2": {"hang_at": 3}}})
    streams += start_streams(server, 1, canary="true", script={"versions": {"2": {"break_at": 3}}})
    for stream in streams:
        assert_whole(stream, {1, 2})
    wait_for(lambda: revived(server, 2, old), PATIENCE, "version 2 after memory ran out")
    wait_for(lambda: answers(server, canary=True), PATIENCE, "the canary")

    old = server.pid(version_owner(2))
    streams = start_streams(server, 1, canary="true", script={"versions": {"2": {"hang_at": 3}}})
    streams += start_streams(server, 1, canary="true", script={"versions": {"2": {"lose_at": 3}}})
    for stream in streams:
        assert_whole(stream, {1, 2})
    wait_for(lambda: revived(server, 2, old), PATIENCE, "version 2 after its GPU was lost")
    wait_for(lambda: answers(server, canary=True), PATIENCE, "the canary")

    old = server.pid(version_owner(2))
    streams = start_streams(server, 1, canary="true", script={"versions": {"2": {"hang_at": 3}}})
    streams += start_streams(server, 1, canary="true", script={"versions": {"2": {"stick_at": 3}}})
    for stream in streams:
        assert_whole(stream, {1, 2})
    wait_for(lambda: revived(server, 2, old), PATIENCE, "version 2 after a step that hung")
    assert "gave no sign of life for 5 s" in server.printed()
    for cause, count in (("died", 2), ("stuck", 1)):
        labels = {"owner": "version-2", "cause": cause}
        wait_for(
            lambda labels=labels, count=count: server.metric("piccard_revivals_total", **labels) == count,
            PATIENCE,
            str(labels),
        )
    wait_for(lambda: answers(server, canary=True), PATIENCE, "the canary")


def test_what_is_killed_and_cannot_be_started_is_given_up_until_an_operator_tries_again(
    fresh_server: FreshServer,
) -> None:
    server = fresh_server(options=("--give-up-after=2",))
    whole = {version: break_version(server, version) for version in (1, 2)}

    kill(server, version_owner(2))
    wait_for(lambda: server.state().versions[2].state is VersionState.FAILED, PATIENCE, "version 2 to be given up")
    reason = server.state().versions[2].reason
    assert "could not be started 2 times in a row" in reason
    assert "schema 7" in reason
    wait_for(lambda: server.metric("piccard_given_up", owner="version-2") == 1, PATIENCE, "the metric")
    # The service does without its canary.
    wait_for(lambda: "deepseek/version-2" in given_up(server), PATIENCE, "the body of /readyz")
    wait_for(lambda: server.get("readyz")[0] == 200, PATIENCE, "readiness")
    assert "piccard revive version-2" in server.piccard("status").stdout

    kill(server, version_owner(1))
    wait_for(lambda: "deepseek/version-1" in given_up(server), PATIENCE, "stable to be given up")
    wait_for(lambda: server.get("readyz")[0] == 503, PATIENCE, "the code")
    assert server.state().versions[1].state is VersionState.STABLE
    both = {"deepseek/version-1", "deepseek/version-2"}
    wait_for(lambda: told_of_server(server)["given_up"].keys() == both, PATIENCE, "the report")
    assert server.piccard("revive", "version-1", check=False).returncode == 1

    for version, text in whole.items():
        mend_version(server, version, text)
        server.piccard("revive", version_owner(version))
    wait_for(lambda: server.get("readyz")[0] == 200, PATIENCE, "readiness")
    wait_for(lambda: told_of_server(server)["given_up"] == {}, PATIENCE, "a clean status")
    assert server.state().versions[2].state is VersionState.CANARY
    wait_for(lambda: answers(server, canary=True), PATIENCE, "the canary")
    wait_for(lambda: server.metric("piccard_given_up") == 0, PATIENCE, "the metric")


def test_a_router_that_is_killed_and_given_up_makes_its_service_not_ready(fresh_server: FreshServer) -> None:
    server = fresh_server(options=("--give-up-after=1",))
    # A dead router is rolled to its other folder.
    code = server.service.repository / server.service.router / "2" / "model.py"
    whole = code.read_text(encoding="utf-8")
    # Else Python takes what was compiled for good and reads the file no more.
    shutil.rmtree(code.parent / "__pycache__")
    code.write_text("raise RuntimeError('broken by the test')\n", encoding="utf-8")

    kill(server, "router")
    wait_for(lambda: "deepseek/router" in given_up(server), PATIENCE, "it to be given up")
    wait_for(lambda: server.get("readyz")[0] == 503, PATIENCE, "the code")
    _, body = server.get("readyz")
    assert body["services"]["deepseek"]["reason"] == "deepseek/router is given up"
    assert "broken by the test" in body["given_up"]["deepseek/router"]
    assert server.get("livez")[0] == 200

    code.write_text(whole, encoding="utf-8")
    server.piccard("revive", "router")
    wait_for(lambda: server.get("readyz")[0] == 200, PATIENCE, "readiness")
    wait_for(lambda: given_up(server) == {}, PATIENCE, "an empty list")
    wait_for(lambda: answers(server) and answers_unary(server), PATIENCE, "answers")
