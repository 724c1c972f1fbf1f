"""A server starts over a canary that broke while it was down: stable answers first, and nobody else is harmed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from piccard.home_init import init_home
from piccard.snapshot import copy_code
from piccard.state_store import StateStore
from piccard_contract.home import Service
from piccard_contract.lifecycle import VersionState
from piccard_contract.version_file import VersionFile
from piccard_server import RunningServer, run_piccard, scripted_version, wait_for
from short_calls import served_by


def delete_checkpoint(service: Service) -> None:
    path = service.version_folder(2) / "version.yaml"
    version = VersionFile(label="v1.1.0", checkpoint=str(service.home / "deleted"), linked=True)
    path.write_text(version.dump(), encoding="utf-8")


def break_code(service: Service) -> None:
    copy_code(service.version_folder(2))
    package = service.version_folder(2) / "code" / "deepseek_engine"
    # What is compiled is never checked against its source, so that has to go as well.
    shutil.rmtree(package / "__pycache__")
    (package / "server_model.py").write_text("raise RuntimeError('this engine is broken')\n", encoding="utf-8")


def newer_schema(service: Service) -> None:
    path = service.version_folder(2) / "version.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("schema: 1", "schema: 7"), encoding="utf-8")


BREAKS = [
    (delete_checkpoint, "deleted is not a folder"),
    (break_code, "this engine is broken"),
    (newer_schema, "schema 7"),
]


def home_of_four(folder: Path) -> Service:
    """Stable 1, canary 2 with half of the traffic, 3 ready, 4 retired; all of them were loaded by a server before."""
    init_home(folder, {number: scripted_version(f"v1.{number - 1}.0") for number in range(1, 5)})
    service = Service(folder)
    with StateStore(service).change() as state:
        for number, path in ((3, "loading probing ready"), (4, "retired")):
            for step in path.split():
                state.move(number, VersionState(step))
    run_piccard(folder, "canary", "set", "--version=2", "--ratio=0.5")
    return service


@pytest.mark.parametrize(("break_it", "reason"), BREAKS, ids=[break_it.__name__ for break_it, _ in BREAKS])
def test_canary_that_broke_fails_alone(tmp_path: Path, break_it: Callable[[Service], None], reason: str) -> None:
    service = home_of_four(tmp_path / "home")
    whole = (service.version_folder(2) / "version.yaml").read_text(encoding="utf-8")
    break_it(service)
    server = RunningServer(service.home)
    try:
        server.wait_ready()
        state = server.state()
        assert state.versions[2].state is VersionState.FAILED
        assert reason in state.versions[2].reason
        assert (state.stable, state.canary) == (1, 2)
        # The first that people are told is where stable answers, then what became of the others.
        printed = server.printed()
        assert printed.index(server.grpc) < printed.index("version 2 failed") < printed.index("version 3 (v1.2.0)")
        with server.control() as control:
            assert control.ready_versions(service.llm) == [1, 3]
        # Its share of the traffic, and who asks for it, get stable.
        assert served_by(server, canary=True) == served_by(server) == 1
        # What was retired does not come back.
        assert state.versions[4].state is VersionState.RETIRED
        assert server.section("version-4") is None
    finally:
        server.stop()
    if break_it is newer_schema:
        (service.version_folder(2) / "version.yaml").write_text(whole, encoding="utf-8")
        assert_back(service)


def assert_back(service: Service) -> None:
    """A canary that was mended is the canary again after the next start."""
    server = RunningServer(service.home)
    try:
        server.wait_ready()
        assert server.state().versions[2].state is VersionState.CANARY
        assert served_by(server, canary=True) == 2
    finally:
        server.stop()


def test_start_finishes_a_promotion_that_was_killed(tmp_path: Path) -> None:
    """State written and nothing else: the start goes by the state, so 2 is served and 1 is what it rolls back to."""
    service = home_of_four(tmp_path / "home")
    with StateStore(service).change() as state:
        state.move(1, VersionState.PREVIOUS)
        state.move(2, VersionState.STABLE)
        state.stable, state.canary, state.previous = 2, None, 1
    server = RunningServer(service.home)
    try:
        server.wait_ready()
        assert served_by(server) == 2
        assert "repaired stable-link" in server.printed()
        wait_for(lambda: server.version_ready(1), 60, "the previous version")
        assert server.piccard("doctor").stdout == "nothing is wrong\n"
    finally:
        server.stop()
