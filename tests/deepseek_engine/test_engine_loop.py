import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from deepseek_engine.departures import Departures
from deepseek_engine.engine_loop import EngineLoop
from deepseek_engine.pulse import Pulse
from deepseek_engine.request import EngineError, EngineOutput, EngineRequest, EngineStats
from patience import wait_until
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.sampling import SamplingParams

CANCELLED = RequestError(ErrorCode.CANCELLED, "cancelled")


def output(
    request_id: str, text: str = "", *, choice: int = 0, end: bool = False, error: EngineError | None = None
) -> EngineOutput:
    reason = "error" if error else "stop" if end else None
    return EngineOutput(request_id, choice, [1], text, 1, 1, 0, finish_reason=reason, error=error)  # type: ignore[arg-type]


class CountingBackend:
    """Answers each request with the numbers 0, 1, 2, …, one a step, `length` of them."""

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.requests: dict[str, int] = {}
        self.choices: dict[str, int] = {}
        self.aborted: list[str] = []
        self.steps = 0
        self.go = threading.Event()
        self.go.set()

    def add(self, request: EngineRequest) -> None:
        if request.id == "bad":
            raise RequestError(ErrorCode.INVALID_TOKEN, "no such token")
        if request.id == "broken":
            raise KeyError("secret")
        self.requests[request.id] = 0
        self.choices[request.id] = request.params.n

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self, departures: Departures | None = None) -> list[EngineOutput]:
        self.go.wait(60)
        self.steps += 1
        return self.outputs()

    def outputs(self) -> list[EngineOutput]:
        outputs = []
        for request_id, number in list(self.requests.items()):
            end = number + 1 == self.length
            outputs += [
                output(request_id, str(number), choice=choice, end=end) for choice in range(self.choices[request_id])
            ]
            self.requests[request_id] += 1
            if end:
                del self.requests[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests), 0, 0, 0, 0, 0, 0, self.steps, 0)


class FailingBackend(CountingBackend):
    """Raises in its second step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def outputs(self) -> list[EngineOutput]:
        if self.steps == 2:
            raise self.error
        return super().outputs()


class ListSink:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.text = ""
        self.ends = 0
        self.error: RequestError | None = None
        self.ended = threading.Event()

    def put(self, outputs: list[EngineOutput], *, last: bool) -> None:
        self.text += "".join(output.text for output in outputs)
        if last:
            self._end()

    def fail(self, error: RequestError) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.ends += 1
        self.ended.set()


@contextmanager
def running(
    backend: CountingBackend,
    on_fatal: Callable[[BaseException], None] = lambda error: None,
    pause: Callable[[], float] | None = None,
) -> Iterator[EngineLoop]:
    loop = EngineLoop(backend, on_fatal=on_fatal, pause=pause)
    loop.start()
    yield loop
    backend.go.set()
    loop.stop()


def submit(loop: EngineLoop, id: str, n: int = 1) -> ListSink:
    sink = ListSink()
    loop.submit(EngineRequest(id, [1], SamplingParams(n=n)), sink)
    return sink


def test_each_request_gets_its_outputs_and_one_end() -> None:
    with running(CountingBackend()) as loop:
        sinks = [submit(loop, str(number)) for number in range(20)]
        assert all(sink.ended.wait(60) for sink in sinks)
    assert [(sink.text, sink.ends, sink.error) for sink in sinks] == [("012", 1, None)] * 20


def test_a_request_ends_when_all_its_choices_have() -> None:
    with running(CountingBackend()) as loop:
        sink = submit(loop, "a", n=2)
        assert sink.ended.wait(60)
    assert (sink.text, sink.ends) == ("001122", 1)


def test_what_the_engine_refuses_comes_through_the_sink() -> None:
    with running(CountingBackend()) as loop:
        bad, broken, good = submit(loop, "bad"), submit(loop, "broken"), submit(loop, "good")
        assert all(sink.ended.wait(60) for sink in (bad, broken, good))
    assert bad.error is not None
    assert bad.error.code is ErrorCode.INVALID_TOKEN
    assert broken.error is not None
    assert broken.error.code is ErrorCode.INTERNAL
    assert "secret" not in broken.error.message
    assert good.text == "012"


def test_an_abort_ends_the_request_here_and_in_the_engine() -> None:
    backend = CountingBackend(length=10**9)
    with running(backend) as loop:
        sink, other = submit(loop, "a"), submit(loop, "b")
        loop.abort("a", CANCELLED)
        loop.abort("nobody", CANCELLED)
        assert sink.ended.wait(60)
        assert not other.ended.is_set()
    assert (sink.error, sink.ends) == (CANCELLED, 1)
    assert backend.aborted == ["a"]


def test_an_abort_interrupts_the_step_that_is_for_its_request_alone() -> None:
    """The step ends by nothing else: a loop that told the engine between two steps only would wait for ever."""

    class Long(CountingBackend):
        def step(self, departures: Departures | None = None) -> list[EngineOutput]:
            assert departures is not None
            with departures.interrupting(frozenset(self.requests)) as interrupt:
                stopped = threading.Event()
                with interrupt.stopping(stopped.set):
                    assert stopped.wait(60)
            self.steps += 1
            return []

    backend = Long()
    with running(backend) as loop:
        first, second = submit(loop, "a"), submit(loop, "b")
        wait_until(lambda: len(backend.requests) == 2)
        loop.abort("a", CANCELLED)
        loop.abort("b", CANCELLED)
        assert first.ended.wait(60)
        assert second.ended.wait(60)
        assert backend.steps >= 1
        # A late one of what has ended is forgotten: it does not end the step of the next of its name.
        loop.abort("a", CANCELLED)
        again = submit(loop, "a")
        wait_until(lambda: bool(backend.requests))
        assert not again.ended.wait(0.1)
        loop.abort("a", CANCELLED)
        assert again.ended.wait(60)


def test_a_choice_that_fails_ends_the_request() -> None:
    class OneFails(CountingBackend):
        def outputs(self) -> list[EngineOutput]:
            error = EngineError(ErrorCode.OVERLOADED, "too late", 7.0)
            return [output("a", "x"), output("a", "", choice=1, error=error)]

    backend = OneFails()
    with running(backend) as loop:
        sink = submit(loop, "a", n=2)
        assert sink.ended.wait(60)
    assert sink.text == "x"
    assert sink.ends == 1
    assert sink.error is not None
    assert (sink.error.code, sink.error.retry_after) == (ErrorCode.OVERLOADED, 7.0)
    assert backend.aborted == ["a"]


def test_a_failure_is_no_response_of_its_own() -> None:
    """An empty one before the error would tell a client of a version that gave it nothing."""

    class Fails(CountingBackend):
        def outputs(self) -> list[EngineOutput]:
            return [output("a", "", error=EngineError(ErrorCode.OUT_OF_MEMORY, "no blocks"))]

    puts: list[int] = []

    class CountingSink(ListSink):
        def put(self, outputs: list[EngineOutput], *, last: bool) -> None:
            puts.append(len(outputs))
            super().put(outputs, last=last)

    sink = CountingSink()
    with running(Fails()) as loop:
        loop.submit(EngineRequest("a", [1], SamplingParams()), sink)
        assert sink.ended.wait(60)
    assert (puts, sink.ends) == ([], 1)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyError("secret"), ErrorCode.INTERNAL),
        (MemoryError(), ErrorCode.OUT_OF_MEMORY),
        (SystemExit(), ErrorCode.INTERNAL),
    ],
)
def test_a_step_that_raises_fails_all_requests_and_tells(raised: BaseException, code: ErrorCode) -> None:
    fatal: list[BaseException] = []
    told = threading.Event()

    def on_fatal(error: BaseException) -> None:
        fatal.append(error)
        told.set()

    backend = FailingBackend(raised)
    # No step ends before both are known to the loop.
    backend.go.clear()
    with running(backend, on_fatal) as loop:
        sinks = [submit(loop, "a"), submit(loop, "b")]
        backend.go.set()
        assert all(sink.ended.wait(60) for sink in sinks)
        assert told.wait(60)
        late = submit(loop, "late")
    assert fatal == [raised]
    for sink in sinks:
        assert sink.error is not None
        assert (sink.error.code, sink.ends) == (code, 1)
        assert "secret" not in sink.error.message
    assert late.error is not None
    assert late.error.code is ErrorCode.UNAVAILABLE


def test_stop_fails_what_still_runs() -> None:
    backend = CountingBackend(length=10**9)
    with running(backend) as loop:
        sink = submit(loop, "a")
    assert sink.ended.wait(60)
    assert sink.error is not None
    assert sink.error.code is ErrorCode.UNAVAILABLE


def test_it_does_not_step_without_work() -> None:
    backend = CountingBackend()
    with running(backend) as loop:
        assert submit(loop, "a").ended.wait(60)
        steps = backend.steps
        time.sleep(0.05)
        assert backend.steps == steps
        assert submit(loop, "b").ended.wait(60)


def test_a_step_that_does_not_end_is_seen_from_outside() -> None:
    backend = CountingBackend()
    backend.go.clear()
    pulse = Pulse()
    loop = EngineLoop(backend, on_fatal=lambda error: None, pulse=pulse)
    loop.start()
    sink = submit(loop, "a")
    wait_until(lambda: pulse.busy and backend.requests)
    beats = pulse.beats
    backend.go.set()
    assert sink.ended.wait(10)
    wait_until(lambda: not pulse.busy)
    assert pulse.beats > beats
    loop.stop()


def test_a_pause_is_waited_and_broken_by_a_command() -> None:
    backend = CountingBackend(length=10**9)
    with running(backend, pause=lambda: 3600.0) as loop:
        sink = submit(loop, "a")
        loop.abort("a", CANCELLED)
        assert sink.ended.wait(60)
    assert sink.error is CANCELLED


def test_requests_from_many_threads_all_end_once() -> None:
    backend = CountingBackend(length=4)
    with running(backend) as loop:
        sinks: list[ListSink] = []

        def client(thread: int) -> None:
            for number in range(50):
                sinks.append(submit(loop, f"{thread}-{number}"))
                if number % 3 == 0:
                    loop.abort(f"{thread}-{number}", CANCELLED)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(sink.ended.wait(60) for sink in sinks)
    assert [sink.ends for sink in sinks] == [1] * 200
    assert all(sink.error is CANCELLED or sink.text == "0123" for sink in sinks)


def test_a_sink_that_fails_does_not_keep_a_failed_engine_alive() -> None:
    class Broken(ListSink):
        def fail(self, error: RequestError) -> None:
            super().fail(error)
            raise OSError("the sink is broken")

    told = threading.Event()
    backend = FailingBackend(KeyError())
    backend.go.clear()
    with running(backend, lambda error: told.set()) as loop:
        sink = Broken()
        loop.submit(EngineRequest("a", [1], SamplingParams()), sink)
        backend.go.set()
        assert told.wait(60)
    assert sink.error is not None
