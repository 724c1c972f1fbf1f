"""What serves the operators of a running version: the file that it writes into its service's run folder.

A section of the state file has no room for it, and nobody reads it at every request. Its tables are data; `doctor` and
`status --verbose` print them.
"""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# Implementations that are no row of a kernel's variant table.
REFERENCE = "torch reference"
LIBRARY = "torch's library"
NOTHING = "nothing"
ONNX_RUNTIME = "ONNX Runtime"


class _Table(BaseModel):
    # A reader may be older than the writer.
    model_config = ConfigDict(extra="ignore")


class OperatorUse(_Table):
    """One implementation of an operator.

    Attributes:
        implementation: a row of the kernel's variant table; LIBRARY where torch's own product on a GPU is as good;
            REFERENCE; ONNX_RUNTIME for a com.deepseek operator of an export; or NOTHING where steps failed for want of
            a row.
        reason: why it was chosen, told of the first shape.
        choices: shapes for which it was chosen. A choice is kept, so this is no count of launches.
        fallback: whether it stands in for a device kernel.
        microseconds: what it takes of a step at batch 1, measured once; None where it was not.
    """

    operator: str
    implementation: str
    reason: str
    choices: int = 0
    fallback: bool = False
    microseconds: float | None = None


class FusionUse(_Table):
    """One fusion: operators that are one launch, or a few, where it applies.

    Attributes:
        operators: of a decode step, those that are in it.
        cause: what is in the way: device, dtype, model, runner, memory space or side effects; empty where it applies.
        reason: the same as a sentence; where it applies, within which limits.
    """

    name: str
    operators: int
    applies: bool
    cause: str = ""
    reason: str = ""


class OperatorsReport(_Table):
    """The operators of one version.

    Attributes:
        pid: of the process that wrote it; the file is worth what that process is.
        step_operators: operators of a decode step, as the model's formulas name them.
        fused_operators: those of them that are inside fused launches.
        graphs: whether steps run from CUDA graphs.
        replays: of graphs, since the warm-up.
        captures, compilations: of graphs and kernels, since the warm-up; each is a delay that should not be.
        ungraphed: steps that were launched kernel by kernel, by cause.
        fallbacks: steps in which an operator ran its torch reference on a GPU, by operator.
    """

    version: int
    pid: int
    device: str = ""
    precision: str = ""
    runner: str = ""
    operators: list[OperatorUse] = Field(default_factory=list)
    fusions: list[FusionUse] = Field(default_factory=list)
    step_operators: int = 0
    fused_operators: int = 0
    graphs: bool = False
    replays: int = 0
    captures: int = 0
    compilations: int = 0
    ungraphed: dict[str, int] = Field(default_factory=dict)
    fallbacks: dict[str, int] = Field(default_factory=dict)

    @property
    def fused_share(self) -> float:
        """0 to 1."""
        return self.fused_operators / self.step_operators if self.step_operators else 0.0


def write_operators(path: Path, report: OperatorsReport) -> None:
    """Replace the file; a reader sees the old or the new content. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(report.model_dump_json(), encoding="utf-8")
    os.replace(temporary, path)


def read_operators(path: Path) -> OperatorsReport | None:
    """What the file holds; None where there is none, or none that this reader knows."""
    try:
        return OperatorsReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None
