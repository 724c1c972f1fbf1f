"""Opens a version's folder: from version.yaml to an engine that is ready for requests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.version_file import Runner, VersionFile, VersionFileError, read_version_file

from deepseek_engine.cpu_threads import compute_threads
from deepseek_engine.operator_watch import OperatorWatch
from deepseek_engine.pulse import Pulse
from deepseek_engine.request import EngineRequest

if TYPE_CHECKING:
    from deepseek_engine.engine import EngineBackend
    from deepseek_engine.text.tokenizer import Tokenizer

# Told a share from 0 to 1 while a version loads.
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """A version that can serve.

    Attributes:
        file: its version.yaml.
        device: where it runs, such as cpu or cuda:0.
        pause: of an `EngineLoop`, for a backend that waits for time.
        play: gives a request its script, where the version plays scripts.
        pulse: shows that its engine gets on.
        operators: tells what serves its operators; None where it has none.
    """

    file: VersionFile
    backend: "EngineBackend"
    tokenizer: "Tokenizer"
    vocab_size: int
    max_model_len: int
    device: str
    pause: Callable[[], float] | None = None
    play: Callable[[EngineRequest, dict[str, Any]], EngineRequest] | None = None
    pulse: Pulse = field(default_factory=Pulse)
    operators: OperatorWatch | None = None

    def scripted(self, request: EngineRequest, script: dict[str, Any] | None) -> EngineRequest:
        """The request with its script. Raises RequestError UNSUPPORTED where the version plays none."""
        if script is None:
            return request
        if self.play is None:
            raise RequestError(
                ErrorCode.UNSUPPORTED, "extensions.script is for versions with runner: scripted; leave it out"
            )
        return self.play(request, script)


def open_version(folder: Path, *, number: int, home: Path, progress: Progress) -> OpenVersion:
    """Open the version in `folder`, to serve it beside a server.

    What its runner does not need is not imported: a scripted version starts without torch.

    Args:
        number: the version's number.
        home: what a relative checkpoint is relative to.

    Raises:
        OSError, VersionFileError: version.yaml is missing or wrong; names the key and the remedy.
        ValueError: the checkpoint or its settings cannot be used; says what to change.
    """
    file = read_version_file(folder)
    if file.runner is Runner.SCRIPTED:
        from deepseek_engine.scripted.version import open_scripted

        return open_scripted(file, number=number)
    checkpoint = checkpoint_folder(file, home)
    if file.runner is Runner.ONNXRUNTIME:
        from deepseek_engine.onnx_version import open_onnxruntime

        return open_onnxruntime(file, checkpoint=checkpoint, home=home, progress=progress, threads=compute_threads())
    from deepseek_engine.torch_version import open_torch

    return open_torch(file, checkpoint=checkpoint, progress=progress, threads=compute_threads())


def checkpoint_folder(file: VersionFile, home: Path) -> Path:
    """The checkpoint's folder. Raises VersionFileError where it does not exist."""
    folder = home / file.checkpoint
    if not folder.is_dir():
        raise VersionFileError(f"version.yaml: checkpoint {folder} is not a folder; publish the version again")
    return folder
