"""The engine backend that plays scripts."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.departures import Departures
from deepseek_engine.request import EngineOutput, EngineRequest, EngineStats
from deepseek_engine.scripted.performance import Performance
from deepseek_engine.scripted.script import script_for
from deepseek_engine.scripted.word_tokenizer import WordTokenizer

BLOCK_SIZE = 16
TOTAL_BLOCKS = 65536


@dataclass(slots=True)
class ScriptedRequest(EngineRequest):
    """A request with what to play for it, as `Script` reads it; None plays the defaults."""

    script: dict[str, Any] | None = None


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stick() -> None:
    threading.Event().wait()


class ScriptedBackend:
    """An `EngineBackend` whose running requests all advance together, each at its own pace.

    Token i of the output depends on prompt, script, choice and version alone, so a request that is resumed from
    `output_ids` goes on at the right place. Cache blocks are counted as an engine would use them.

    Args:
        tokenizer: whose ids these are.
        version: the number by which scripts know this version.
        max_model_len: context in tokens.
        clock: seconds, monotonic.
        die: ends the process, for `die_at`.
        stick: never returns, for `stick_at`.
    """

    def __init__(
        self,
        tokenizer: WordTokenizer,
        *,
        version: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        die: Callable[[], None] = _die,
        stick: Callable[[], None] = _stick,
    ) -> None:
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._version = version
        self._clock = clock
        self._die = die
        self._stick = stick
        self._running: dict[str, list[Performance]] = {}
        self._ended: list[EngineOutput] = []
        self._generated_tokens = 0
        self._prompt_tokens = 0

    def add(self, request: EngineRequest) -> None:
        """Start a request; INVALID_VALUE for a script that cannot be read or an id that is running."""
        if request.id in self._running:
            raise RequestError(ErrorCode.INVALID_VALUE, f"request id {request.id} is running already; use another one")
        if request.output_ids and request.params.n > 1:
            raise RequestError(ErrorCode.INVALID_VALUE, "output_ids resumes one choice; set n to 1")
        settings = request.script if isinstance(request, ScriptedRequest) else None
        script = script_for(settings, self._version)
        self._prompt_tokens += len(request.prompt_ids)
        self._running[request.id] = [
            Performance(
                request,
                choice,
                script,
                self._tokenizer,
                version=self._version,
                max_output=request.params.max_tokens or self.max_model_len - len(request.prompt_ids),
                starts_at=self._clock() + script.first_delay_s,
            )
            for choice in range(request.params.n)
        ]

    def abort(self, request_id: str) -> None:
        """End a request's choices with reason abort, told by the next step; unknown ones are ignored."""
        for performance in self._running.pop(request_id, []):
            self._ended.append(performance.output(finish_reason="abort"))

    def has_work(self) -> bool:
        """Whether anything runs or is to be told."""
        return bool(self._running or self._ended)

    def pause(self) -> float:
        """Seconds until the next step has anything to do; infinite while everything hangs."""
        if self._ended:
            return 0.0
        due = min((performance.due for choices in self._running.values() for performance in choices), default=math.inf)
        return max(0.0, due - self._clock())

    def step(self, departures: Departures | None = None) -> list[EngineOutput]:
        """One token of every request whose time has come."""
        # A step takes no time.
        del departures
        now = self._clock()
        outputs, self._ended = self._ended, []
        for request_id, choices in list(self._running.items()):
            for performance in [performance for performance in choices if performance.due <= now]:
                self._advance(performance, outputs)
            choices[:] = [performance for performance in choices if not performance.ended]
            if not choices:
                del self._running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        running = [performance for choices in self._running.values() for performance in choices]
        used = sum(-(-performance.num_tokens // BLOCK_SIZE) for performance in running)
        return EngineStats(
            running=len(running),
            waiting=0,
            free_blocks=max(0, TOTAL_BLOCKS - used),
            total_blocks=TOTAL_BLOCKS,
            cached_blocks=0,
            prefix_hit_tokens=0,
            preemptions=0,
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            load=min(1.0, used / TOTAL_BLOCKS),
        )

    def _advance(self, performance: Performance, outputs: list[EngineOutput]) -> None:
        script, position = performance.script, performance.num_output
        if script.die_at == position:
            self._die()
        if script.stick_at == position:
            self._stick()
        if script.break_at == position:
            raise MemoryError(f"the script breaks the engine at token {position}")
        if script.lose_at == position:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nThe script says so.")
        if script.hang_at == position:
            performance.due = math.inf
            return
        output = performance.fail() if script.fail_at == position else performance.next_token()
        self._generated_tokens += len(output.token_ids)
        outputs.append(output)
