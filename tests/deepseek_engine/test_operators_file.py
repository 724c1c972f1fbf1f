import logging
from pathlib import Path

import pytest
from deepseek_engine.operator_watch import OperatorFigures, OperatorWatch
from deepseek_engine.operators_file import REFRESH_SECONDS, OperatorsFile
from piccard_contract.operators import OperatorsReport, OperatorUse, read_operators


class Scene:
    """A watch whose process a test moves on."""

    def __init__(self) -> None:
        self.figures = OperatorFigures(replays=5, captures=40, compilations=50, ungraphed={"longer": 1})
        self.uses = [OperatorUse(operator="rms_norm", implementation="small", reason="it fits", choices=1)]
        self.revision = 1
        self.now = 100.0
        self.watch = OperatorWatch(
            figures=lambda: self.figures,
            operators=lambda: list(self.uses),
            fusions=[],
            step_operators=8,
            fused_operators=6,
            revision=lambda: self.revision,
            precision="bfloat16",
            graphs=True,
        )

    def report(self) -> OperatorsReport:
        return self.watch.report(3, "cuda:0", "torch")

    def file(self, path: Path) -> OperatorsFile:
        return OperatorsFile(path, self.report, lambda: self.watch.revision, clock=lambda: self.now)


def test_a_report_counts_from_the_warm_up() -> None:
    scene = Scene()
    scene.figures = OperatorFigures(
        {("rms_norm", "model"): 4, ("rms_norm", "dtype"): 1},
        replays=105,
        captures=41,
        compilations=50,
        ungraphed={"longer": 4, "other": 0},
    )
    told = scene.report()
    assert (told.replays, told.captures, told.compilations, told.ungraphed) == (100, 1, 0, {"longer": 3})
    assert (told.fallbacks, told.fused_share) == ({"rms_norm": 5}, 0.75)


def test_it_is_written_when_something_is_new_and_now_and_then(tmp_path: Path) -> None:
    scene, path = Scene(), tmp_path / "operators.json"
    file = scene.file(path)
    file.refresh()
    assert read_operators(path) == scene.report()
    scene.figures = OperatorFigures(replays=6, captures=40, compilations=50)
    file.refresh()
    assert (told := read_operators(path)) is not None
    assert told.replays == 0
    scene.now += REFRESH_SECONDS
    file.refresh()
    assert read_operators(path) == scene.report()
    scene.uses.append(OperatorUse(operator="rope", implementation="small", reason="it fits"))
    scene.revision = 2
    file.refresh()
    assert (told := read_operators(path)) is not None
    assert [use.operator for use in told.operators] == ["rms_norm", "rope"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["operators.json"]
    file.remove()
    file.remove()
    assert read_operators(path) is None


def test_a_disk_that_takes_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    file = scene.file(tmp_path / "missing" / "operators.json")
    with caplog.at_level(logging.WARNING):
        for revision in range(3):
            scene.revision = revision
            scene.figures = OperatorFigures(replays=revision)
            file.refresh()
    assert len(caplog.records) == 1
    (tmp_path / "missing").mkdir()
    scene.now += REFRESH_SECONDS
    file.refresh()
    assert read_operators(tmp_path / "missing" / "operators.json") == scene.report()


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]", "\udcff"])
def test_what_is_no_report_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "operators.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_operators(path) is None
