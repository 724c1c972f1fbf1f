"""Engine code for tests: a version that stops a generation after a chosen token and says nothing more.

It is put into an `Installation`, where `install` makes every version of it do what `extensions.script` says: {"2": 5}
has version 2 stop after five tokens of the whole output. To its client that is a version that hangs, and once its
process is killed one that died after exactly that token.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepseek_engine.request import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from installation import Installation

_WRAP = """
from deepseek_engine.held_engine import held  # noqa: E402

open_version = held(open_version)
"""


def install(installation: "Installation") -> None:
    """Make this the engine code of an installation."""
    with open(__file__, encoding="utf-8") as source:
        (installation.packages / "deepseek_engine" / "held_engine.py").write_text(source.read(), encoding="utf-8")
    installation.append("deepseek_engine/version.py", _WRAP)


def held(open_version: Callable[..., Any]) -> Callable[..., Any]:
    """`open_version` with versions that can be held."""

    def opened(*arguments: Any, number: int, **settings: Any) -> Any:
        version = open_version(*arguments, number=number, **settings)
        backend = HeldBackend(version.backend)

        def play(request: EngineRequest, script: dict[str, int]) -> EngineRequest:
            if str(number) in script:
                backend.holds[request.id] = script[str(number)]
            return request

        return replace(version, backend=backend, play=play)

    return opened


class HeldBackend:
    """An engine some of whose requests stop without an end.

    Attributes:
        holds: tokens of the whole output after which a request stops, by its id.
    """

    def __init__(self, backend: Any) -> None:
        self.holds: dict[str, int] = {}
        self._backend = backend
        self._held: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, departures: Any = None) -> list[EngineOutput]:
        told = [output for output in self._backend.step(departures) if output.request_id not in self._held]
        for output in told:
            reached = output.num_output_tokens >= self.holds.get(output.request_id, output.num_output_tokens + 1)
            if reached and output.finish_reason is None:
                self._held.add(output.request_id)
                self._backend.abort(output.request_id)
        return told
