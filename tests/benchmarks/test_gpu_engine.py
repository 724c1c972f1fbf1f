"""The conductor of the whole-engine benchmark: which processes run, what follows a broken one, what a budget cuts."""

import json
import sys
from pathlib import Path

import gpu_engine
import pytest
from whole_engine.results import Row, read, unfinished

Runs = list[tuple[str, list[str]]]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_engine, "read_through", lambda folder: 0)
    return tmp_path / "weights"


def conduct(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, broken: frozenset[str] = frozenset()
) -> tuple[Runs, list[dict[str, object]]]:
    """Run main with a double of its processes: each section writes a figure, a broken one ends its process."""
    runs: Runs = []

    def process(self: gpu_engine.Conductor, group: str, sections: list[str]) -> int:
        runs.append((group, sections))
        for name in sections:
            self._log.write(begin=name)
            if name in broken:
                return 134
            self._log.add(Row(name, "case", 1.0, "ms"))
        return int("make" in broken and group == "make")

    monkeypatch.setattr(gpu_engine.Conductor, "_process", process)
    gpu_engine.main(arguments)
    out = Path(arguments[arguments.index("--out") + 1])
    return runs, read([out / "gpu_engine.jsonl"])


def test_processes_in_their_order(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = conduct(["--out", str(tmp_path / "out"), "--folder", str(weights)], monkeypatch)
    assert runs == [("make", []), *gpu_engine.GROUPS.items()]
    (result,) = (tmp_path / "out").glob("gpu_engine-*.json")
    assert [row["section"] for row in json.loads(result.read_text())["rows"]] == gpu_engine.ALL


def test_only_what_is_asked_for(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "is_whole", lambda *_: True)
    arguments = ["--out", str(tmp_path), "--folder", str(weights), "--sections", "long,decode"]
    assert conduct(arguments, monkeypatch)[0] == [("bulk", ["decode", "long"])]


def test_sections_after_a_broken_one_run(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--out", str(tmp_path), "--folder", str(weights)]
    broken = frozenset({"generate", "long", "start"})
    runs, lines = conduct(arguments, monkeypatch, broken)
    assert runs[1:] == [
        ("interactive", ["start", "streams"]),
        ("interactive", ["streams"]),
        ("bulk", gpu_engine.GROUPS["bulk"]),
        ("bulk", ["prefill", "first", "tail", "trace", "filtered", "long"]),
        ("invariant", ["invariant"]),
        ("transformers", ["transformers"]),
        ("runners", ["onnxruntime"]),
    ]
    assert [told.split(":")[0] for told in unfinished(lines)] == ["failed start", "failed generate", "failed long"]


def test_without_weights_there_is_nothing(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="making the weights failed"):
        conduct(["--out", str(tmp_path), "--folder", str(weights)], monkeypatch, frozenset({"make"}))


def test_a_spent_budget_skips_and_says_so(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, lines = conduct(["--out", str(tmp_path), "--folder", str(weights), "--budget", "-1"], monkeypatch)
    assert runs == [("make", [])]
    assert len(unfinished(lines)) == len(gpu_engine.GROUPS)


def test_what_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import sys, time\nprint(sys.argv)\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu_engine, "__file__", str(script))
    monkeypatch.setattr(gpu_engine, "GRACE", 0.0)
    options = gpu_engine.parse_arguments(["--out", str(tmp_path), "--budget", "0"])
    conductor = gpu_engine.Conductor(options, [])
    conductor._group("bulk", ["decode"])
    assert conductor._process("bulk", ["decode"]) != 0


def test_what_a_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "tells.py"
    script.write_text(f"import json, sys\nopen({str(tmp_path / 'told')!r}, 'w').write(json.dumps(sys.argv[1:]))\n")
    monkeypatch.setattr(gpu_engine, "__file__", str(script))
    given = ["--smoke", "--layers", "2", "--sections", "decode,first", "--budget", "100", "--out", str(tmp_path)]
    conductor = gpu_engine.Conductor(gpu_engine.parse_arguments(given), given)
    assert conductor._process("bulk", ["first"]) == 0
    told = gpu_engine.parse_arguments(json.loads((tmp_path / "told").read_text()))
    assert (told.worker, told.sections, told.smoke, told.layers, told.shape) == ("bulk", ["first"], True, 2, "tiny")
    assert told.deadline - told.started == pytest.approx(100, abs=60)


def test_several_runs_are_assembled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, value in enumerate((3.0, 2.0)):
        line = {"row": vars(Row("decode", "batch 1", value, "x floor", "less", 2.5))}
        (tmp_path / f"{place}.jsonl").write_text(json.dumps(line) + "\n")
    files = [str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]
    gpu_engine.main(["--out", str(tmp_path), "--assemble", *files])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["decode", "batch", "1", "2", "x", "floor", "2.5", "met"]


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_engine.parse_arguments(["--sections", "decode,nothing"])
    assert "there is no section nothing; there are start" in capsys.readouterr().err


def test_the_conductor_needs_no_torch() -> None:
    import subprocess

    code = f"import sys; sys.path.insert(0, {str(Path(gpu_engine.__file__).parent)!r}); import gpu_engine; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
