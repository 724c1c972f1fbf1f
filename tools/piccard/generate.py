"""`piccard generate CHECKPOINT`: runs a checkpoint without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piccard_contract.errors import RequestError
from piccard_contract.request import GenerateRequest
from piccard_contract.sampling import SamplingParams
from piccard_contract.validation import explain
from piccard_contract.version_file import VersionFile
from pydantic import ValidationError

from piccard.checkpoint_folder import check_checkpoint
from piccard.errors import OperationError

if TYPE_CHECKING:
    from deepseek_engine.request import EngineOutput
    from deepseek_engine.version import OpenVersion, Progress


@dataclass(slots=True)
class Piece:
    """New text of the generation; the last piece tells why and how it ended."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int


def open_checkpoint(checkpoint: Path, settings: dict[str, Any], progress: Progress) -> OpenVersion:
    """An engine over `checkpoint`.

    Args:
        settings: keys of version.yaml, such as profile, precision and device.

    Raises:
        OperationError: the folder is no checkpoint, or the engine cannot run it.
    """
    check_checkpoint(checkpoint)
    try:
        file = VersionFile.model_validate({"label": "generate", "checkpoint": str(checkpoint.absolute()), **settings})
    except ValidationError as error:
        raise OperationError(explain(error), exit_code=2) from error
    # torch takes seconds to import; only here is it needed.
    from deepseek_engine.cpu_threads import compute_threads
    from deepseek_engine.torch_version import open_torch

    try:
        return open_torch(file, checkpoint=checkpoint.absolute(), progress=progress, threads=compute_threads())
    except (OSError, ValueError) as error:
        raise OperationError(f"{checkpoint} cannot be run: {error}") from error


def generate(version: OpenVersion, request: GenerateRequest) -> Iterator[Piece]:
    """Text as it comes.

    Raises:
        OperationError: the prompt or a parameter does not fit the checkpoint, or the model fails.
    """
    from deepseek_engine.prompt import PromptReader
    from deepseek_engine.request import EngineRequest

    reader = PromptReader(version.tokenizer, version.vocab_size, version.max_model_len)
    try:
        prompt = reader.read(request)
        version.backend.add(EngineRequest(request.id, prompt.ids, request.sampling))
    except RequestError as error:
        raise OperationError(error.message) from error
    while version.backend.has_work():
        for output in version.backend.step():
            yield _piece(output)


def read_sampling(values: dict[str, Any]) -> SamplingParams:
    """Sampling parameters of the command line; None takes the default.

    Raises:
        OperationError: a value is out of range.
    """
    try:
        return SamplingParams.model_validate({name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise OperationError(explain(error), exit_code=2) from error


def _piece(output: EngineOutput) -> Piece:
    if output.error is not None:
        raise OperationError(f"{output.error.code}: {output.error.message}")
    return Piece(output.text, output.finish_reason, output.num_prompt_tokens, output.num_output_tokens)
