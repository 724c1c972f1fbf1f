"""The whole engine on one GPU, on random bf16 weights of DeepSeek-V2-Lite's shape, against floors, targets and peers.

    PYTHONPATH=contract:python_backend python benchmarks/gpu_engine.py [--sections NAME,...] [--budget SECONDS]
    python benchmarks/gpu_engine.py --smoke                      # every path at a tiny size, on a CPU too
    python benchmarks/gpu_engine.py --assemble RUN.jsonl ...     # the table of several runs, nothing measured

Weights are made once, in --folder, and used again where they are whole; a peer can load the same folder. Their routing
goes through the real gate, and what it touches is counted. A decoding step is (time of N2 - time of N1 new
tokens) / (N2 - N1) through `Engine.step`, host included, at temperature 0.6. Its floor is the bytes that it must read,
each weight once, of the experts those that were touched, and the latent cache, over the rate of a copy measured in the
same run. Processes of their own measure what would disturb each other:

    interactive  start, streams                     the default profile, Triton's cache empty
    bulk         decode, generate, prefill, first, tail, trace, filtered, long
    invariant    invariant                          decoding in the batch-invariant mode
    transformers transformers                       its generate on the same folder
    runners      onnxruntime                        decode of runner onnxruntime beside runner torch, in turns

Figures are appended to gpu_engine.jsonl as they come; a section that breaks its process costs that section alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whole_engine.checkpoint import SHAPES, is_whole, read_through
from whole_engine.results import Log, assemble, read, table, unfinished

GROUPS = {
    "interactive": ["start", "streams"],
    "bulk": ["decode", "generate", "prefill", "first", "tail", "trace", "filtered", "long"],
    "invariant": ["invariant"],
    "transformers": ["transformers"],
    "runners": ["onnxruntime"],
}
ALL = [name for names in GROUPS.values() for name in names]
# What a process may take beyond the budget to end the case that it is in.
GRACE = 20.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--shape", choices=SHAPES, default=None, help="default: v2-lite, tiny with --smoke")
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--folder", type=Path, help="of the weights; default: one under the temporary folder")
    parser.add_argument("--export", type=Path, help="of the weights, made if absent; default: beside --folder")
    parser.add_argument("--ops-library", type=Path, help="operators of runner onnxruntime; default: built")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto takes a GPU where there is one")
    parser.add_argument("--memory", default="0.6", help="weights and cache: a share of the GPU, or an amount: 80GiB")
    parser.add_argument("--budget", type=float, help="seconds after which nothing further is begun")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--append", action="store_true", help="keep what an earlier run has left in --out")
    parser.add_argument("--smoke", action="store_true", help="every path once, at sizes that say nothing")
    parser.add_argument("--assemble", type=Path, nargs="+", help="JSON lines of earlier runs, the latest last")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.shape = options.shape or ("tiny" if options.smoke else "v2-lite")
    layers = "" if options.layers is None else f"-{options.layers}"
    options.folder = (
        options.folder or Path(tempfile.gettempdir()) / f"gpu_engine-{options.shape}{layers}-{options.seed}"
    )
    options.sections = options.sections.split(",")
    unknown = sorted(set(options.sections) - set(ALL))
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(ALL)}")
    return options


def work(options: argparse.Namespace) -> None:
    """The part of one process."""
    began = time.time()
    import torch
    from whole_engine.worker import WORKERS, Work

    device = options.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    memory = options.memory if options.memory.endswith("iB") else float(options.memory)
    WORKERS[options.worker](
        Work(
            sections=options.sections,
            folder=options.folder,
            log=Log(options.out / "gpu_engine.jsonl"),
            device=torch.device(device),
            memory=None if device == "cpu" else memory,
            shape=options.shape,
            layers=options.layers,
            seed=options.seed,
            smoke=options.smoke,
            started=(options.started, began),
            deadline=options.deadline,
            export=options.export,
            ops_library=options.ops_library,
        )
    )


class Conductor:
    """Starts the processes one after another and goes on after one that breaks."""

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        self._options = options
        self._arguments = arguments
        self._log = Log(options.out / "gpu_engine.jsonl")
        self._deadline = None if options.budget is None else time.time() + options.budget
        self._environment = dict(os.environ)

    def run(self) -> None:
        layers = () if self._options.layers is None else (self._options.layers,)
        config = SHAPES[self._options.shape](*layers)
        if not is_whole(self._options.folder, config, self._options.seed) and (code := self._process("make", [])):
            raise SystemExit(f"making the weights failed with exit code {code}")
        begin = time.monotonic()
        size = read_through(self._options.folder)
        print(
            f"-- {size / 1e9:.1f} GB of weights read into the page cache in {time.monotonic() - begin:.1f} s",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as cache:
            if "start" in self._options.sections:
                # Empty for the start; the processes after it find what it has compiled.
                self._environment["TRITON_CACHE_DIR"] = cache
            for group, names in GROUPS.items():
                self._group(group, [name for name in names if name in self._options.sections])

    def _group(self, group: str, sections: list[str]) -> None:
        while sections:
            if self._deadline is not None and time.time() >= self._deadline:
                self._log.write(skipped=", ".join(sections), why="the time is used up")
                return
            begun = len(self._log.begun())
            code = self._process(group, sections)
            if code == 0:
                return
            started = self._log.begun()[begun:]
            broken = started[-1] if started else sections[0]
            self._log.write(failed=broken, why=f"its process ended with exit code {code}")
            print(f"-- {broken} broke its process, exit code {code}", flush=True)
            sections = sections[sections.index(broken) + 1 :]

    def _process(self, group: str, sections: list[str]) -> int:
        """Run one process to its end, which is forced some time after the deadline; returns its exit code."""
        command = [sys.executable, __file__, *self._arguments, "--worker", group, "--out", str(self._options.out)]
        command += ["--started", repr(time.time())]
        command += ["--sections", ",".join(sections)] if sections else []
        if self._deadline is not None:
            command += ["--deadline", repr(self._deadline)]
        process = subprocess.Popen(command, env=self._environment)
        limit = None if self._deadline is None else max(self._deadline + GRACE - time.time(), 1.0)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def finish(lines: list[dict[str, Any]], out: Path) -> None:
    """The result file, and the table last."""
    path, rows = assemble(lines, out)
    for told in unfinished(lines):
        print(told)
    print(f"-- {path}")
    print(table(rows), flush=True)


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(given)
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        work(options)
        return
    if options.assemble:
        finish(read(options.assemble), options.out)
        return
    path = options.out / "gpu_engine.jsonl"
    if not options.append:
        path.unlink(missing_ok=True)
    try:
        Conductor(options, given).run()
    finally:
        finish(read([path]), options.out)


if __name__ == "__main__":
    main()
