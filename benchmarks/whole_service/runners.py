"""Runner onnxruntime as the canary of runner torch, both on one card, on the demo checkpoint."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepseek_engine.text.tokenizer import Tokenizer
from piccard.installation import demo_checkpoint
from piccard_contract.home import version_owner
from piccard_contract.operators import read_operators
from piccard_contract.version_file import Precision, VersionFile
from piccard_server import RunningServer, wait_for
from whole_engine.results import Row

from whole_service import card
from whole_service.agreement import agreement, differences
from whole_service.clients import Load, Record, served

if TYPE_CHECKING:
    from gpu_service import Course

SECTION = "runners"
CANARY, WHILE_KILLED = 0.05, 0.5
REVIVAL = 120.0
"""Seconds that a killed version has to come back in."""
GPU_MEMORY, CPU_MEMORY = "12GiB", "256MiB"


def run_runners(course: "Course", folder: Path) -> None:
    """Version 1 with runner torch, version 2 with runner onnxruntime."""
    on_gpu = card.name() != "cpu"
    # A CPU has float32 operators alone, and with them the texts have to be the same.
    precision = Precision.BFLOAT16 if on_gpu else Precision.FLOAT32
    memory = GPU_MEMORY if on_gpu else CPU_MEMORY
    checkpoint = demo_checkpoint()
    version = VersionFile(label="torch", checkpoint=str(checkpoint), precision=precision, memory=memory, linked=True)
    with course.serving(SECTION, folder, version) as server:
        ours = course.answers(server, 1)
        publish = ["publish", str(checkpoint), "--runner", "onnxruntime", "--label", "onnxruntime"]
        publish += ["--device", "cuda:0" if on_gpu else "cpu", "--precision", precision.value, "--memory", memory]
        if course.options.ops_library is not None:
            publish += ["--ops-library", str(course.options.ops_library.absolute())]
        code, _ = course.command(SECTION, "runner onnxruntime", server, *publish)
        if code:
            raise RuntimeError("version 2 was not published")
        theirs = course.answers(server, 2)
        course.look(SECTION, "both", server)
        for number in (1, 2):
            _tell_operators(course, server, number)
        _tell_texts(course, checkpoint, ours, theirs, exact=not on_gpu)
        options = course.options
        vocabulary = Tokenizer.from_folder(checkpoint).vocab_size
        load = Load(server.grpc, options.streams, options.prompt, options.tokens, vocabulary)
        course.under_load(server, load, folder, lambda: _stages(course, server))


def _stages(course: "Course", server: RunningServer) -> None:
    course.wait("runner torch alone")
    _share(course, server, CANARY)
    # One stream in twenty goes there, so it takes longer to see as many.
    course.wait("runner onnxruntime gets 5 %", 1.5)
    _share(course, server, WHILE_KILLED)
    course.wait("runner onnxruntime gets half", 0.5)
    course.check_time("the kill")
    course.seconds(SECTION, "killed version, until it is ready again", _kill(server, 2))
    course.wait("half after the kill", 0.5)
    _share(course, server, CANARY)
    if course.during("promotion", server, "promote", "2"):
        raise RuntimeError("version 2 was not promoted")
    course.wait("runner onnxruntime stable")
    if course.during("rollback", server, "rollback"):
        raise RuntimeError("version 1 was not made stable again")
    course.wait("runner torch stable again", 0.5)


def _share(course: "Course", server: RunningServer, ratio: float) -> None:
    code, _ = course.command(SECTION, f"{ratio:.0%}", server, "canary", "set", "--version", "2", "--ratio", str(ratio))
    if code:
        raise RuntimeError(f"version 2 was not given {ratio:.0%}")


def _kill(server: RunningServer, number: int) -> float:
    """Kill a version's process; returns seconds until another one is ready in its place."""
    killed, began = server.pid(version_owner(number)), time.monotonic()
    os.kill(killed, signal.SIGKILL)

    def back() -> bool:
        section = server.section(version_owner(number))
        return section is not None and section.pid != killed and server.version_ready(number)

    wait_for(back, REVIVAL, f"version {number} after it was killed")
    return time.monotonic() - began


def _tell_operators(course: "Course", server: RunningServer, number: int) -> None:
    report = read_operators(server.service.operators_file(number))
    if report is None:
        raise RuntimeError(f"version {number} has not told what serves its operators")
    case = f"version {number}, {report.runner}: operators within fused launches"
    course.log.add(Row(SECTION, case, report.fused_share, "of a step", "more", details=report.model_dump()))


def _tell_texts(
    course: "Course", checkpoint: Path, ours: Sequence[Record], theirs: Sequence[Record], *, exact: bool
) -> None:
    """How many texts are the same, and what the float64 model makes of the first difference of the others."""
    versions = {record.version for record in ours}, {record.version for record in theirs}
    if versions != ({1}, {2}):
        raise RuntimeError(f"pinned answers came of the versions {versions}")
    answers, others = served(checkpoint, ours), served(checkpoint, theirs)
    found = differences(checkpoint, answers, others)
    error = agreement(checkpoint, answers).error
    share = 1.0 - len(found) / len(ours)
    details: dict[str, Any] = {"answers": len(ours), "differences": [asdict(each) for each in found], "error": error}
    course.log.add(
        Row(
            SECTION, "greedy texts of both runners the same", share, "", "more", 1.0 if exact else None, details=details
        )
    )
    worst = max((each.margin for each in found), default=0.0)
    course.log.add(Row(SECTION, "largest float64 margin of a first difference", worst, "logit", "less", error))
