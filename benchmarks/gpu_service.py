"""A whole service on one GPU: a real tritonserver, versions published, canaried, promoted and retired on one card.

    python benchmarks/gpu_service.py [--sections demo,roll,runners] [--folder DIR] [--budget SECONDS]
    python benchmarks/gpu_service.py --smoke                     # every path at a tiny size, on a CPU too

    demo  serves the demo checkpoint; its greedy text is compared with the CPU's model, teacher-forced, at the end
    roll  random bf16 weights of DeepSeek-V2-Lite's shape as version 1 under a load of streams; version 2 of the same
          weights is published beside it, gets 5 % of the traffic, is promoted, and version 1 is retired; a third that
          does not fit is refused. What the streams felt is told stage by stage, beside the memory of the card and what
          `piccard doctor` and `status` say.
    runners  the demo checkpoint with runner torch as version 1 and with runner onnxruntime as version 2, on one card:
          their greedy texts side by side; then under a load of streams version 2 gets 5 % of the traffic, is killed
          while it has half of it, comes back, and is promoted

Weights are made once, in --folder, while demo runs. Figures are appended to gpu_service.jsonl as they come.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import tritonclient.grpc.aio as grpcclient
from deepseek_engine.text.tokenizer import Tokenizer
from piccard.home_init import init_home
from piccard.installation import demo_checkpoint
from piccard.mps import is_on, pipe_folder
from piccard.server_log import server_log
from piccard_contract.version_file import Precision, VersionFile
from piccard_server import RunningServer
from whole_engine.checkpoint import SHAPES, is_whole
from whole_engine.results import Log, Row, assemble, read, table, unfinished
from whole_service import card
from whole_service.clients import PROMPTS, Clients, Load, Record, Served, ask, prompt_text, served
from whole_service.runners import run_runners
from whole_service.stages import Stage

SECTIONS = ("demo", "roll", "runners")
CANARY = 0.05
# Seconds that ending the streams and the server and telling of them may take.
ENDING = 25.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--shape", choices=SHAPES, default=None, help="default: v2-lite, tiny with --smoke")
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--folder", type=Path, help="of the weights; default: one under the temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", help="of each version; default: 0.45, 256MiB with --smoke")
    parser.add_argument("--streams", type=int, default=16, help="at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--window", type=float, help="seconds of each stage; default: 10, 3 with --smoke")
    parser.add_argument("--budget", type=float, help="seconds after which no further stage is begun")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--ops-library", type=Path, help="operators of runner onnxruntime; default: built")
    parser.add_argument("--compare", action="store_true", help="only what an earlier run in --out served, with the CPU")
    parser.add_argument("--smoke", action="store_true", help="every path once, at sizes that say nothing")
    options = parser.parse_args(arguments)
    options.shape = options.shape or ("tiny" if options.smoke else "v2-lite")
    options.memory = options.memory or ("256MiB" if options.smoke else "0.45")
    options.window = options.window or (3.0 if options.smoke else 10.0)
    name = f"gpu_engine-{options.shape}{'' if options.layers is None else f'-{options.layers}'}-{options.seed}"
    options.folder = (options.folder or Path(tempfile.gettempdir()) / name).absolute()
    options.sections = options.sections.split(",")
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    options.config = SHAPES[options.shape](*(() if options.layers is None else (options.layers,)))
    options.deadline = None if options.budget is None else time.monotonic() + options.budget
    return options


class OutOfTimeError(Exception):
    """The budget is used up; what was measured is kept."""


class Weights:
    """The random checkpoint, made by a process of its own where it is not there."""

    _MAKE = (
        "import json, sys, torch; from pathlib import Path; from whole_engine.checkpoint import ensure; "
        "ensure(Path(sys.argv[1]), json.loads(sys.argv[2]), seed=int(sys.argv[3]), "
        "device=torch.device('cuda:0' if torch.cuda.is_available() else 'cpu'))"
    )

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.folder
        self._process: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()
        if not is_whole(self.folder, options.config, options.seed):
            given = [str(self.folder), json.dumps(options.config), str(options.seed)]
            self._process = subprocess.Popen([sys.executable, "-c", self._MAKE, *given], cwd=Path(__file__).parent)

    def wait(self) -> None:
        """Wait until they are whole. Raises RuntimeError where making them failed."""
        if self._process is not None and self._process.wait():
            raise RuntimeError(f"making the weights failed with exit code {self._process.returncode}")
        print(f"-- weights are whole after {time.monotonic() - self._began:.1f} s", flush=True)

    def end(self) -> None:
        """End what still makes them."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Course:
    """One run: what it finds goes to its log, row by row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.log = Log(options.out / "gpu_service.jsonl")
        self._section = ""
        self._stages: list[Stage] = []

    def left(self, needed: float, what: str) -> bool:
        """Whether `needed` seconds are left; else `what` is noted as skipped."""
        deadline = self.options.deadline
        if deadline is None or time.monotonic() + needed <= deadline:
            return True
        self.log.write(skipped=what, why="the time is used up")
        print(f"-- {what} is left out: the time is used up", flush=True)
        return False

    def seconds(self, section: str, case: str, value: float, **details: Any) -> None:
        self.log.add(Row(section, case, round(value, 3), "s", details=details))

    @contextmanager
    def serving(self, section: str, folder: Path, version: VersionFile) -> Iterator[RunningServer]:
        """A server over a new home with this version alone, ended afterwards; its log is kept where it fails."""
        home = folder / section
        init_home(home, {1: version})
        self._section, self._stages = section, []
        began = time.monotonic()
        server = RunningServer(home, threads=None)
        try:
            server.wait_ready(self._patience())
            self.seconds(section, "server start to a ready version", time.monotonic() - began, memory=card.memory())
            yield server
        except BaseException:
            self._keep_logs(section, server)
            raise
        finally:
            self._stop(section, server)

    def _patience(self) -> float:
        deadline = self.options.deadline
        return 600.0 if deadline is None else max(30.0, deadline - time.monotonic())

    def _keep_logs(self, section: str, server: RunningServer) -> None:
        log = server_log(server.home)
        text = server.printed() + (log.read_text(errors="replace") if log.exists() else "no log of tritonserver\n")
        (self.options.out / f"gpu_service-{section}.log").write_text(text)
        print(text[-4000:], flush=True)

    def _stop(self, section: str, server: RunningServer) -> None:
        try:
            server.stop(60.0)
        except AssertionError as error:
            self.log.write(failed=f"{section}: the end of the server", why=str(error)[-2000:])

    def command(self, section: str, case: str, server: RunningServer, *arguments: str) -> tuple[int, float]:
        """Run piccard, keep what it says; returns its exit code and seconds."""
        began = time.monotonic()
        told = server.piccard(*arguments, check=False)
        took = time.monotonic() - began
        row = Row(section, f"{case}: piccard {arguments[0]}", round(took, 3), "s")
        row.details = {
            "command": " ".join(["piccard", *arguments]),
            "exit_code": told.returncode,
            "output": told.stdout[-20000:],
            "errors": told.stderr[-3000:],
        }
        self.log.add(row)
        if told.returncode and arguments[0] != "doctor":
            print(told.stdout + told.stderr, flush=True)
        return told.returncode, took

    def look(self, section: str, case: str, server: RunningServer) -> None:
        """Keep the card's memory, `doctor` and `status`."""
        found = card.memory()
        if found:
            self.log.add(Row(section, f"{case}: memory of the card", found["used_mib"], "MiB", details=found))
        self.command(section, case, server, "doctor")
        self.command(section, case, server, "status", "--json")

    # demo

    def demo(self, folder: Path) -> None:
        """The demo checkpoint's greedy text."""
        checkpoint = demo_checkpoint()
        version = VersionFile(
            label="v1.0.0",
            checkpoint=str(checkpoint),
            precision=Precision.BFLOAT16,
            memory="512MiB" if self.options.smoke else "12GiB",
            linked=True,
        )
        with self.serving("demo", folder, version) as server:
            self.look("demo", "serving", server)
            records = self.answers(server)
        answers = [asdict(each) for each in served(checkpoint, records)]
        self.log.write(served=answers)

    def answers(self, server: RunningServer, version: int | None = None) -> list[Record]:
        """Greedy answers to each prompt, of a version where it is named. Raises RuntimeError where one is not whole."""
        records = asyncio.run(_answers(server.grpc, 16 if self.options.smoke else 64, version))
        wrong = [record.error for record in records if record.error]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(records)} streams failed: {wrong[0]}")
        return records

    def compare(self) -> None:
        """What demo served against the CPU's model, which needs no card."""
        kept = [each for line in read([self.log.path]) for each in line.get("served", ())]
        if not kept:
            return
        from whole_service.agreement import agreement

        answers = [Served(**each) for each in kept]
        found = agreement(demo_checkpoint(), answers)
        tokenizer = Tokenizer.from_folder(demo_checkpoint())
        details = found.as_json() | {"texts": [tokenizer.decode(answer.output) for answer in answers]}
        share32 = found.float32_agreeing / found.positions
        self.log.add(Row("demo", "top 1 agrees with float32", share32, "", "more", 0.99, details=details))
        self.log.add(Row("demo", "top 1 agrees with float64", found.share, "", "more", 0.99))
        worst = max((each.margin for each in found.disagreements), default=0.0)
        self.log.add(Row("demo", "largest float64 margin of a disagreement", worst, "logit", "less", found.error))

    # roll

    def roll(self, folder: Path, weights: Weights) -> None:
        """Version 2 takes over from version 1 under load."""
        weights.wait()
        options = self.options
        memory: float | str = options.memory if options.memory.endswith("iB") else float(options.memory)
        version = VersionFile(
            label="v1", checkpoint=str(weights.folder), precision=Precision.BFLOAT16, memory=memory, linked=True
        )
        with self.serving("roll", folder, version) as server:
            load = Load(server.grpc, options.streams, options.prompt, options.tokens, options.config["vocab_size"])
            self.under_load(server, load, folder, lambda: self._stages_of(server, weights.folder))

    def under_load(self, server: RunningServer, load: Load, folder: Path, run: Callable[[], None]) -> None:
        """Call `run` while streams go on, and tell what they felt."""
        section = self._section
        clients = Clients(load, folder)
        try:
            clients.wait_running()
            run()
        except OutOfTimeError as error:
            self.log.write(skipped=f"{section} from {error} on", why="the time is used up")
        except Exception as error:
            self.log.write(failed=section, why=f"{type(error).__name__}: {error}")
            traceback.print_exc()
            self._keep_logs(section, server)
        finally:
            self._tell_streams(clients.stop())

    def _stages_of(self, server: RunningServer, weights: Path) -> None:
        self.wait("alone")
        self.look("roll", "version 1 alone", server)
        publish = ("publish", str(weights), "--precision", "bfloat16", "--no-hash-weights")
        code = self.during("while version 2 loads", server, *publish, "--label", "v2", "--memory", self.options.memory)
        if code:
            raise RuntimeError("version 2 was not published")
        self.wait("version 2 idle")
        self.look("roll", "version 2 idle", server)
        self.command("roll", "canary", server, "canary", "set", "--version", "2", "--ratio", str(CANARY))
        # One stream in twenty goes there, so it takes longer to see as many.
        self.wait("version 2 gets 5 %", 1.5)
        self.during("promotion", server, "promote", "2")
        self.wait("version 2 stable, version 1 idle", 0.5)
        # As much again does not fit on a card; on a CPU, whose versions share nothing, no amount this small does.
        memory = "1MiB" if card.name() == "cpu" else self.options.memory
        if self.left(70.0, "a third version"):
            self.during("while version 3 is refused", server, *publish, "--label", "v3", "--memory", memory)
            self.command("roll", "refused", server, "retire", "3")
        self.during("retirement", server, "retire", "1", "--force", "--wait", "60")
        self.wait("version 2 alone", 0.7)
        self.look("roll", "version 2 alone", server)

    def check_time(self, what: str) -> None:
        deadline = self.options.deadline
        if deadline is not None and time.monotonic() > deadline - ENDING:
            raise OutOfTimeError(what)

    def wait(self, name: str, windows: float = 1.0) -> None:
        """Let the streams run for as many windows, as a stage of this name. Raises OutOfTimeError."""
        self.check_time(name)
        begin = time.monotonic()
        time.sleep(windows * self.options.window)
        self._stages.append(Stage(name, begin, time.monotonic()))

    def during(self, name: str, server: RunningServer, *arguments: str) -> int:
        """Run piccard as a stage of this name; returns its exit code. Raises OutOfTimeError."""
        self.check_time(name)
        begin = time.monotonic()
        code, _ = self.command(self._section, name, server, *arguments)
        self._stages.append(Stage(name, begin, time.monotonic()))
        return code

    def _tell_streams(self, records: list[Record]) -> None:
        lost = [record.error for record in records if record.error]
        by_version = {number: sum(record.version == number for record in records) for number in (1, 2, 3)}
        details = {"streams": len(records), "by_version": by_version, "errors": sorted(set(lost))[:20]}
        self.log.add(
            Row(self._section, "streams lost or cut short", len(lost), "streams", "less", 0.0, details=details)
        )
        alone: dict[str, Any] | None = None
        for stage in self._stages:
            stable = stage.figures(records)
            alone = alone or stable
            self._tell_stage(stage, records, stable, alone)

    def _tell_stage(
        self, stage: Stage, records: list[Record], all_streams: dict[str, Any], alone: dict[str, Any]
    ) -> None:
        parts = {f"version_{number}": stage.figures(records, number) for number in (1, 2)}
        rate = all_streams["tokens_per_second"]
        details = {"all": all_streams, **parts}
        self.log.add(Row(self._section, f"{stage.name}: rate", rate, "tokens/s", "more", details=details))
        if all_streams is not alone and alone["tokens_per_second"]:
            slower = rate / alone["tokens_per_second"]
            self.log.add(Row(self._section, f"{stage.name}: rate over alone", slower, "x", "more"))
        for number in (1, 2):
            found = parts[f"version_{number}"]["between_tokens_ms"]
            if found:
                for name in ("p50", "p99"):
                    case = f"{stage.name}: version {number}, between tokens {name}"
                    self.log.add(Row(self._section, case, found[name], "ms"))


async def _answers(address: str, tokens: int, version: int | None) -> list[Record]:
    """Each prompt alone, one after another, and then all at once."""
    client = grpcclient.InferenceServerClient(address)

    def asked(prompt: str) -> Coroutine[Any, Any, Record]:
        return ask(client, prompt_text(prompt), tokens, version=version)

    try:
        alone = [await asked(prompt) for prompt in PROMPTS]
        return [*alone, *await asyncio.gather(*map(asked, PROMPTS))]
    finally:
        await client.close()


def _guarded(course: Course, section: str, run: Callable[[], None]) -> None:
    """A section that breaks costs that section alone."""
    try:
        run()
    except Exception as error:
        course.log.write(failed=section, why=f"{type(error).__name__}: {error}"[-3000:])
        traceback.print_exc()


def finish(course: Course) -> None:
    """The result file, and the table last."""
    lines = read([course.log.path])
    # Versions that compute at once and versions that take turns are two results.
    name = "gpu_service-mps" if any(line.get("header", {}).get("mps") for line in lines) else "gpu_service"
    written, rows = assemble(lines, course.options.out, name)
    for told in unfinished(lines):
        print(told)
    print(f"-- {written}")
    print(table(rows), flush=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    course = Course(options)
    if options.compare:
        course.compare()
        finish(course)
        return
    course.log.path.unlink(missing_ok=True)
    settings = ("shape", "layers", "memory", "streams", "prompt", "tokens", "window", "seed")
    told = {"card": card.name(), "mps": is_on(pipe_folder(os.environ))}
    course.log.write(header={**told, **{name: getattr(options, name) for name in settings}})
    weights = Weights(options) if "roll" in options.sections else None
    try:
        with tempfile.TemporaryDirectory(prefix="piccard-bench-") as folder:
            if "demo" in options.sections:
                _guarded(course, "demo", lambda: course.demo(Path(folder)))
            if weights is not None and course.left(60.0, "roll"):
                _guarded(course, "roll", lambda: course.roll(Path(folder), weights))
            if "runners" in options.sections and course.left(60.0, "runners"):
                _guarded(course, "runners", lambda: run_runners(course, Path(folder)))
        if course.left(15.0, "the comparison, which --compare makes up for"):
            _guarded(course, "compare", course.compare)
    finally:
        if weights is not None:
            weights.end()
        finish(course)


if __name__ == "__main__":
    main()
