"""What a running server and its home take of the machine: processes, threads, descriptors, memory, files."""

import os
from contextlib import suppress
from pathlib import Path

import psutil
from piccard.shared_memory import home_prefix, regions
from piccard_contract.live_state import LiveState
from piccard_contract.process_lock import holder_pid
from piccard_server import RunningServer

MIB = 2.0**20

# What a sample measures, by unit: how much of it is noise is the business of `growth`.
Footprint = dict[str, float]


def footprint(server: RunningServer) -> Footprint:
    """All that could leak, as `what of whom` -> amount; memory and disk in MiB.

    Processes are told by their names in the service (version-1, router, ...); take it while no version comes or goes.
    """
    taken: Footprint = {}
    processes = _processes(server)
    taken["processes"] = len(processes)
    for name, process in processes.items():
        with suppress(psutil.NoSuchProcess), process.oneshot():
            memory = process.memory_info()
            taken[f"resident MiB of {name}"] = memory.rss / MIB
            taken[f"threads of {name}"] = process.num_threads()
            taken[f"descriptors of {name}"] = process.num_fds()
    shared = regions(home_prefix(server.home))
    taken["shared-memory regions"] = len(shared)
    taken["shared-memory MiB"] = sum(_size(path) for path in shared) / MIB
    service = server.service
    logs = server.home / "state" / "logs"
    taken["disk MiB of the logs"] = sum(map(_size, _files(logs))) / MIB
    for name, folder in (
        ("the home", server.home),
        ("staging", server.home / "staging"),
        ("versions", service.llm_folder),
        ("run", service.run_folder),
    ):
        # What logs take is bounded by putting them aside, and grows until then.
        files = [path for path in _files(folder) if path.parent != logs and path != service.audit_log]
        taken[f"files of {name}"] = len(files)
        taken[f"disk MiB of {name}"] = sum(map(_size, files)) / MIB
    taken["state.json KiB"] = service.state_json.stat().st_size / 1024
    with server.control() as control:
        taken["entries of the server's index"] = len(control.index())
    taken["sections of the live state"] = _sections(server)
    lines = server.metrics_text().splitlines()
    taken["lines of the server's own metrics"] = sum(line.startswith("nv_") for line in lines)
    taken["lines of /metrics"] = len(lines) - taken["lines of the server's own metrics"]
    return taken


def _processes(server: RunningServer) -> dict[str, psutil.Process]:
    root = psutil.Process(server.process.pid)
    owners = _owners(server)
    found = {"supervisor": root}
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found[owners.get(process.pid) or f"{process.name()} {process.pid}"] = process
    return found


def _owners(server: RunningServer) -> dict[int, str]:
    live = LiveState(server.service.live_state, server.service.run_folder)
    try:
        sections = live.sections()
    finally:
        live.close()
    names = {section.pid: section.owner for section in sections if section.alive}
    return names | {server.server_pid(): "tritonserver", holder_pid(server.service.gateway_lock) or 0: "gateway"}


def _sections(server: RunningServer) -> int:
    live = LiveState(server.service.live_state, server.service.run_folder)
    try:
        return len(live.sections())
    finally:
        live.close()


def _files(folder: Path) -> list[Path]:
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]


def _size(path: Path) -> int:
    """Bytes on the disk; 0 for what is gone meanwhile."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
