"""Versions with a real engine each, called without a server: requests and responses pass through their tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from canary_fakes import PlayedFrame
from deepseek_engine.engine import Engine
from deepseek_engine.generation import Generation
from deepseek_engine.prompt import PromptReader
from deepseek_engine.request import EngineOutput
from deepseek_engine.scripted import ScriptedBackend
from deepseek_engine.scripted.version import open_scripted
from deepseek_engine.text.output_text import OutputText
from deepseek_engine.version import OpenVersion
from piccard_canary.protocols import Frame
from piccard_contract.errors import RequestError
from piccard_contract.request import GenerateRequest, parse_request, request_inputs
from piccard_contract.response import Response
from piccard_contract.version_file import Runner, VersionFile
from toy_model import toy_engine
from toy_tokenizer import toy_tokenizer

# How a version ends a request before its time: it says so, the call raises, or the answer ends without a word. Tokens
# that were on their way get lost with the last two.
Ending = Literal["error", "raise", "silence"]


@dataclass(frozen=True)
class Break:
    """The version's end, after `after` tokens of the whole output."""

    after: int
    how: Ending


@dataclass
class EngineVersions:
    """A `VersionClient` over engines; every call is kept.

    Attributes:
        make: opens a version by its number.
        breaks: of versions that fail every request.
        endless: versions that send the last token as any other, and are gone before they say that it was the last.
        chunks: outputs in each response, in turn; those after the last are sent one by one.
    """

    make: Callable[[int], OpenVersion]
    breaks: dict[int, Break] = field(default_factory=dict)
    endless: frozenset[int] = frozenset()
    chunks: list[int] = field(default_factory=list)
    calls: list[tuple[int, GenerateRequest]] = field(default_factory=list)

    def open(self, version: int, request: GenerateRequest, outputs: frozenset[str]) -> Iterator[Frame]:
        self.calls.append((version, request))
        frames = self._frames(version, parse_request(request_inputs(request), {}, request_id="r"))
        for frame in frames:
            frame.outputs = {name: values for name, values in frame.outputs.items() if name in outputs}
            yield frame

    def cancel(self, version: int, token: str) -> bool:
        return False

    def _frames(self, number: int, request: GenerateRequest) -> Iterator[PlayedFrame]:
        version = self.make(number)
        generation = generation_of(version, number, request)
        chunks = iter(self.chunks)
        pending: list[EngineOutput] = []
        size = next(chunks, 1)
        ids = [*request.output_ids]
        for outputs in _steps(version, generation, self.breaks.get(number)):
            failed = next((output.error for output in outputs if output.error is not None), None)
            pending += [output for output in outputs if output.error is None]
            if failed is not None:
                error = RequestError(failed.code, failed.message)
                yield PlayedFrame(generation.respond(pending, error), request, final=True)
                return
            final = any(output.finish_reason for output in outputs)
            if final and number in self.endless:
                pending[-1] = _without_end(pending[-1], version, request, ids)
                yield PlayedFrame(generation.respond(pending), request, final=False)
                return
            ids += [token for output in outputs for token in output.token_ids]
            if final or len(pending) >= size:
                yield PlayedFrame(generation.respond(pending), request, final=final)
                pending, size = [], next(chunks, 1)


def whole_answer(version: OpenVersion, request: GenerateRequest) -> Response:
    """What a version answers that nothing interrupts, as one response."""
    generation = generation_of(version, 1, request.model_copy(update={"repeat_prompt": False}))
    answer = generation.respond([])
    for outputs in _steps(version, generation, None):
        answer.extend(generation.respond(outputs))
    return answer


def generation_of(version: OpenVersion, number: int, request: GenerateRequest) -> Generation:
    reader = PromptReader(version.tokenizer, version.vocab_size, version.max_model_len)
    return Generation(
        request, reader.read(request), version.tokenizer, id="r", version=number, cancel_token="token", direct=False
    )


def _without_end(
    output: EngineOutput, version: OpenVersion, request: GenerateRequest, before: list[int]
) -> EngineOutput:
    """The last output with its token alone, after the tokens `before`: what the end released is not in its text."""
    params = request.sampling
    text = OutputText(
        version.tokenizer,
        params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        min_tokens=params.min_tokens,
        output_ids=before,
    )
    told, _ = text.push(output.token_ids)
    # The text of a stop token is told by nobody.
    return replace(output, text=told if output.text.startswith(told) else "", finish_reason=None, stop_reason=None)


def _steps(version: OpenVersion, generation: Generation, breaks: Break | None) -> Iterator[list[EngineOutput]]:
    """The outputs of each step of one request."""
    backend = version.backend
    request = generation.request
    backend.add(version.scripted(generation.engine_request(), request.extensions.script))
    count = len(request.output_ids)
    while backend.has_work():
        if breaks is not None and count >= breaks.after:
            if breaks.how == "raise":
                raise OSError("the call broke")
            if breaks.how == "silence":
                return
            _break(backend, count)
        outputs = backend.step()
        count = max([count, *(output.num_output_tokens for output in outputs)])
        if outputs:
            yield outputs


def _break(backend: Any, count: int) -> None:
    """Have the next step fail in the engine itself."""
    if isinstance(backend, ScriptedBackend):
        for performances in backend._running.values():
            for performance in performances:
                performance.script = performance.script.model_copy(update={"fail_at": count})
        return
    assert isinstance(backend, Engine)

    def explode(plan: object, interrupt: object) -> None:
        raise RuntimeError("the runner broke")

    cast(Any, backend._runner).execute = explode


def scripted_version(number: int) -> OpenVersion:
    """A version that plays scripts; texts of words, cut into tokens of seven bytes at most."""
    file = VersionFile(label="v1", checkpoint="scripted", runner=Runner.SCRIPTED, linked=True)
    return open_scripted(file, number=number)


def toy_version(number: int) -> OpenVersion:
    """A version with the toy model, whose tokens are bytes."""
    engine = toy_engine()
    return OpenVersion(
        file=VersionFile(label="v1", checkpoint="toy"),
        backend=engine,
        tokenizer=toy_tokenizer(),
        vocab_size=260,
        max_model_len=engine.max_model_len,
        device="cpu",
    )
