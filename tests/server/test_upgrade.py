"""Upgrades on a real server: changed engine code runs beside the old, and routers go over to new code under load."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entry_points import ENTRY_POINTS, Answer
from installation import Installation, InstalledServer
from piccard_server import wait_for
from running_stream import RunningStream
from triton_calls import grpc_stream

pytestmark = pytest.mark.timeout(900)

TOKENS = 4
STEPS = ("router", "router_unary", "admission")

# A router's answers tell that it runs this code.
ROUTER_MARK = """
def _marked(answer, mark):
    def wrapped(self, admitted, sender):
        send = sender.send

        def told(response, *, final):
            response.details["router"] = mark
            send(response, final=final)

        sender.send = told
        answer(self, admitted, sender)

    return wrapped


Router.answer = _marked(Router.answer, {mark!r})
"""

# What a later release may add: a router says more of an attempt, a version counts and tells more.
LATER_ATTEMPT = """
_asked_before = version_request


def version_request(*arguments, **settings):
    request = _asked_before(*arguments, **settings)
    attempt = request.extensions.attempt.model_copy(update={"trace": "00-1"})
    return request.model_copy(update={"extensions": request.extensions.model_copy(update={"attempt": attempt})})
"""
LATER_DETAILS = """
_details_before = _details


def _details(response, *, final):
    details = _details_before(response, final=final)
    if final:
        details["usage"]["reasoning_tokens"] = 0
        details["release"] = "later"
    return details
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledServer]:
    """A server of an installation of its own, with linked scripted versions 1 (stable) and 2."""
    folder = tmp_path_factory.mktemp("upgrade")
    installation = Installation(folder / "installation")
    home = folder / "home"
    installation.run(home, "init", "--runner=scripted")
    installation.run(home, "canary", "off")
    running = InstalledServer(installation, home)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def status(server: InstalledServer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.piccard("status", "--json").stdout)
    found["by_number"] = {version["version"]: version for version in found["versions"]}
    return found


def publish(server: InstalledServer, label: str) -> int:
    """Publish a scripted version with a snapshot of what is installed now; its number."""
    result = server.piccard("publish", "scripted", "--runner=scripted", f"--label={label}", "--json")
    number: int = json.loads(result.stdout)["after"]["version"]
    return number


def ask(
    server: InstalledServer,
    entry: str = "grpc_stream",
    *,
    headers: dict[str, str] | None = None,
    version: int | None = None,
    script: dict[str, Any] | None = None,
    **inputs: Any,
) -> Answer:
    """A request of four tokens."""
    inputs |= {
        "text_input": "a b",
        "exclude_input_in_output": True,
        "return_cumulative_logprob": True,
        "extensions": {"script": {"tokens": TOKENS, "delay_s": 0.005, **(script or {})}},
    }
    return ENTRY_POINTS[entry](server, headers or {}, {} if version is None else {"version": version}, inputs)


def total(answer: Answer) -> float:
    """The sum of log-probabilities."""
    assert answer.code == "OK", answer.error_text
    value: float = answer.responses[-1]["cumulative_logprob"][0]
    return value


def test_a_version_of_changed_engine_code_is_compared_with_the_old(server: InstalledServer) -> None:
    old = publish(server, "v1.2.0")
    found = status(server)
    first, before = found["by_number"][1]["code"], found["installed_code"]["engine"]
    # What a scripted version says of every token.
    server.installation.change(
        "deepseek_engine/scripted/performance.py", lambda text: text.replace("LOGPROB = -0.25", "LOGPROB = -0.5")
    )
    new = publish(server, "v1.3.0")

    found = status(server)
    installed = found["installed_code"]["engine"]
    versions = found["by_number"]
    assert installed != before
    assert [versions[n]["code"] for n in (1, old, new)] == [first, before, installed]
    assert [versions[n]["published_code"] for n in (1, old, new)] == [first, before, installed]
    assert [versions[n]["linked"] for n in (1, old, new)] == [True, False, False]
    # Version 1 would run the new code after its next start, whoever starts it.
    assert installed[:12] in versions[1]["drift"]
    assert versions[old]["drift"] == versions[new]["drift"] == ""
    told = json.loads(server.piccard("doctor", "--json", check=False).stdout)["after"]["findings"]
    assert [finding["problem"].partition(" runs")[0] for finding in told if finding["trap"] == "drift"][:2] == [
        "version 1",
        "version 2",
    ]

    server.piccard("canary", "set", f"--version={new}", "--ratio=0.5")
    sums = {1: -0.25 * TOKENS, old: -0.25 * TOKENS, new: -0.5 * TOKENS}
    for version in (1, old, new):
        assert total(ask(server, version=version)) == sums[version]
    assert ask(server, headers={"X-Canary": "true"}).version == new
    assert ask(server, headers={"X-Canary": "false"}).version == 1
    served: set[int] = set()
    for _ in range(200):
        answer = ask(server)
        assert total(answer) == sums[answer.version]
        served.add(answer.version)
        if len(served) == 2:
            break
    assert served == {1, new}
    for version in served:
        line = f'piccard_requests_total{{reason="ratio",service="deepseek",version="{version}"}}'
        wait_for(lambda line=line: line in server.metrics_text(), 60, line)  # type: ignore[misc]

    # The old code goes on with what the new code began.
    script = {"tag": True, "versions": {str(new): {"fail_at": 2}}}
    answer = ask(server, headers={"X-Canary": "true"}, script=script, stream=True)
    assert (answer.code, answer.version, answer.reason) == ("OK", 1, "resumed")
    assert answer.text == f" a@{new} b@{new} a@1 b@1"
    assert total(answer) == -0.5 * 2 - 0.25 * 2
    assert answer.details["usage"]["completion_tokens"] == TOKENS


class Load:
    """Requests on every kind of entry point, one after the other in each of some threads, until it is stopped."""

    def __init__(self, server: InstalledServer) -> None:
        self.answers: list[Answer] = []
        self.failures: list[object] = []
        self._server = server
        self._stop = threading.Event()
        kinds = (("grpc_stream", True), ("grpc_unary", False), ("generate_stream", True), ("http_infer", False))
        self._threads = [threading.Thread(target=self._run, args=kind, daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()

    def more(self, count: int) -> None:
        """Wait until as many further requests were answered."""
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted or self.failures, 120, f"{count} more answers")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, entry: str, stream: bool) -> None:
        while not self._stop.is_set():
            try:
                answer = ask(self._server, entry, **({"stream": True} if stream else {}))
            except Exception as error:
                self.failures.append(error)
            else:
                whole = answer.code == "OK" and answer.text == " a b a b" and len(answer.token_ids) == TOKENS
                (self.answers if whole else self.failures).append(answer)
            # The machine may be small: the load is to be there all the time, and not to be all that runs.
            self._stop.wait(0.05)


def endless(server: InstalledServer) -> RunningStream:
    """A stream that runs until it is cancelled."""
    return RunningStream(
        server.grpc,
        server.service.ensemble,
        headers={"x-canary": "false"},
        text_input="a b",
        sampling_parameters={"max_tokens": 20_000},
        extensions={"script": {"tokens": 20_000, "delay_s": 0.05}},
    ).wait_first()


def cancel(server: InstalledServer, stream: RunningStream) -> None:
    """End an endless stream by its token, through whatever routers there are now."""
    token = stream.responses[0]["cancel_token"][0]
    grpc_stream(server.grpc, server.service.ensemble, text_input="", extensions={"cancel": token})
    stream.wait()
    assert "[CANCELLED" in str(stream.error)


def release(server: InstalledServer, mark: str) -> None:
    server.installation.append("piccard_canary/router.py", ROUTER_MARK.format(mark=mark))


def marks(server: InstalledServer) -> set[str | None]:
    """What the routers that new requests reach say of their code."""
    return {ask(server, entry).details.get("router") for entry in ("grpc_stream", "grpc_unary")}


def check_roll(server: InstalledServer, mark: str) -> None:
    """Install routers that say `mark` and roll over to them: neither requests nor a stream that runs notice."""
    places = server.control().ready_versions(server.service.router)
    folder = 1 if places == [2] else 2
    release(server, mark)
    stream = endless(server)
    load = Load(server)
    load.more(8)
    outcome = json.loads(server.piccard("roll", "--wait=60", "--json").stdout)
    assert {name: place["folder"] for name, place in outcome["after"].items()} == dict.fromkeys(STEPS, folder)
    load.more(16)
    assert marks(server) == {mark}
    count = len(stream.token_ids)
    wait_for(lambda: len(stream.token_ids) > count, 60, "more tokens through the old router")
    load.stop()
    assert load.failures == []
    cancel(server, stream)

    found = status(server)
    running = [found["processes"][f"{name}.2" if folder == 2 else name] for name in STEPS]
    assert {process["code"] for process in running} == {found["installed_code"]["ensemble"]}
    assert {process["drift"] for process in running} == {""}
    assert not any(found["server"]["revivals"].values()), found["server"]["revivals"]


def test_routers_and_versions_of_two_releases_serve_together(server: InstalledServer) -> None:
    before = marks(server)
    snapshot = publish(server, "v2.0.0")
    # A later release: more in what a router says to a version, and in what a version answers.
    server.installation.change(
        "piccard_contract/request.py",
        lambda text: text.replace("    cancel_token: str\n", '    cancel_token: str\n    trace: str = ""\n', 1),
    )
    server.installation.append("piccard_contract/response.py", LATER_DETAILS)
    server.installation.append("piccard_canary/attempt.py", LATER_ATTEMPT)
    newer = publish(server, "v2.1.0")
    # Routers of the release before call a version of the later one.
    answer = ask(server, version=newer)
    assert (answer.code, answer.version, answer.details["release"]) == ("OK", newer, "later")
    assert marks(server) == before
    assert "`piccard roll`" in server.piccard("status").stdout

    check_roll(server, "later")

    # Snapshots of both releases serve under routers of the later one, and so does a linked version of the one before.
    for version in (1, snapshot, newer):
        answer = ask(server, version=version)
        assert (answer.code, answer.version) == ("OK", version), answer.error_text


def test_a_roll_waits_for_the_one_before_and_goes_back(server: InstalledServer) -> None:
    stream = endless(server)
    server.piccard("roll", "router")
    refused = server.piccard("roll", "router", "--wait=0", check=False)
    assert refused.returncode == 1
    assert "has requests yet" in refused.stderr
    cancel(server, stream)
    server.piccard("roll", "router_unary", "admission", "--wait=60")

    check_roll(server, "latest")

    assert not json.loads(server.piccard("roll", "--json").stdout)["changed"]
    for model in (server.service.router, server.service.router_unary, server.service.admission):
        assert len(server.control().ready_versions(model)) == 1


def test_broken_code_is_not_rolled_to(server: InstalledServer) -> None:
    before = server.control().ready_versions(server.service.router)
    server.installation.append("piccard_canary/router.py", "raise RuntimeError('a broken release')\n")
    refused = server.piccard("roll", "router", check=False)
    assert refused.returncode == 1
    assert "a broken release" in refused.stderr
    assert "Traceback" not in refused.stderr
    # The old router serves on, and so it does after another try.
    assert server.piccard("roll", "router", check=False).returncode == 1
    assert server.control().ready_versions(server.service.router) == before
    assert ask(server).code == "OK"

    server.installation.change(
        "piccard_canary/router.py", lambda text: text.replace("raise RuntimeError('a broken release')", "# mended")
    )
    server.piccard("roll", "router")
    assert server.control().ready_versions(server.service.router) != before
    assert ask(server).code == "OK"


def test_code_is_tried_from_an_environment_of_its_own(server: InstalledServer, tmp_path: Path) -> None:
    """Whose command publishes, its packages are the snapshot's; what is installed for the server stays."""
    other = Installation(tmp_path / "other")
    other.append("deepseek_engine/scripted/__init__.py", "TRIED = True\n")
    before = status(server)
    result = other.run(server.home, "publish", "scripted", "--runner=scripted", "--label=v3.0.0", "--json")
    number = json.loads(result.stdout)["after"]["version"]

    found = status(server)
    version = found["by_number"][number]
    assert version["code"] == version["published_code"]
    assert version["code"] not in {known["code"] for known in before["versions"]}
    assert found["installed_code"] == before["installed_code"]
    assert ask(server, version=number).code == "OK"
