import threading

from deepseek_engine.request import EngineOutput
from deepseek_engine.responder import TAKEN_LIMIT, TAKEN_POLL, Outbox, Responder
from hypothesis import given, settings
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError

FAILURE = RequestError(ErrorCode.INTERNAL, "failed")


def output(text: str) -> EngineOutput:
    return EngineOutput("a", 0, [], text, 1, 1, 0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Sender:
    """Keeps the responses of one request."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finals: list[bool] = []
        self.error: RequestError | None = None
        self.ended = threading.Event()

    def __call__(self, outputs: list[EngineOutput], error: RequestError | None, final: bool) -> None:
        self.texts.append("".join(output.text for output in outputs))
        self.finals.append(final)
        self.error = error
        if final:
            self.ended.set()


def drain(responder: Responder) -> None:
    while responder.send_next():
        pass


def test_what_comes_while_it_waits_for_its_turn_goes_into_one_response() -> None:
    responder, sender = Responder(), Sender()
    outbox = responder.outbox(sender)
    outbox.put([output("a")], last=False)
    responder.send_next()
    outbox.put([output("b")], last=False)
    outbox.put([output("c"), output("d")], last=False)
    drain(responder)
    assert sender.texts == ["a", "bcd"]


def test_the_interval_holds_all_but_the_first_and_the_last_back() -> None:
    clock, sender = Clock(), Sender()
    responder = Responder(clock)
    outbox = responder.outbox(sender, interval=1.0)
    for text in "abc":
        outbox.put([output(text)], last=False)
        drain(responder)
    assert sender.texts == ["a"]
    clock.now += 1.0
    drain(responder)
    assert sender.texts == ["a", "bc"]
    outbox.put([output("d")], last=False)
    outbox.put([output("e")], last=True)
    drain(responder)
    assert sender.texts == ["a", "bc", "de"]
    clock.now += 5.0
    drain(responder)
    assert sender.finals == [False, False, True]


def test_a_held_request_gets_one_response() -> None:
    responder, sender = Responder(), Sender()
    outbox = responder.outbox(sender, hold=True)
    for text in "abc":
        outbox.put([output(text)], last=text == "c")
        drain(responder)
    assert (sender.texts, sender.finals) == (["abc"], [True])


def test_an_announcement_is_sent_at_once_and_the_first_token_too() -> None:
    responder, sender = Responder(Clock()), Sender()
    outbox = responder.outbox(sender, interval=1.0)
    outbox.announce()
    drain(responder)
    outbox.put([output("a")], last=False)
    drain(responder)
    assert sender.texts == ["", "a"]


def test_an_error_comes_after_what_was_produced_and_ends_the_request() -> None:
    responder, sender = Responder(), Sender()
    outbox = responder.outbox(sender)
    outbox.put([output("a")], last=False)
    outbox.fail(FAILURE)
    outbox.put([output("late")], last=True)
    drain(responder)
    assert (sender.texts, sender.finals, sender.error) == (["a"], [True], FAILURE)


def test_under_load_responses_rest_and_carry_more_but_first_tokens_do_not_wait() -> None:
    clock = Clock()
    work = 0.0

    class Laborious(Sender):
        def __call__(self, outputs: list[EngineOutput], error: RequestError | None, final: bool) -> None:
            nonlocal work
            work += 0.01
            super().__call__(outputs, error, final)

    responder = Responder(clock, lambda: work)
    first, second = Laborious(), Laborious()
    running = responder.outbox(first, relay=3.0)
    running.put([output("a")], last=False)
    drain(responder)
    for text in "bc":
        clock.now += 0.03
        running.put([output(text)], last=False)
        drain(responder)
    assert first.texts == ["a"]
    responder.outbox(second, relay=3.0).put([output("x")], last=False)
    drain(responder)
    assert (first.texts, second.texts) == (["a"], ["x"])
    clock.now += 0.2
    drain(responder)
    assert first.texts == ["a", "bc"]


def test_requests_take_turns() -> None:
    responder = Responder()
    order: list[str] = []
    outboxes = [responder.outbox(lambda outputs, error, final: order.append(outputs[0].text)) for _ in range(2)]
    outboxes[0].put([output("first 1")], last=False)
    outboxes[1].put([output("second 1")], last=False)
    responder.send_next()
    outboxes[0].put([output("first 2")], last=False)
    drain(responder)
    assert order == ["first 1", "second 1", "first 2"]


def test_a_sender_that_raises_harms_no_other() -> None:
    responder, sender = Responder(), Sender()

    def broken(outputs: list[EngineOutput], error: RequestError | None, final: bool) -> None:
        raise OSError("gone")

    responder.outbox(broken).put([output("a")], last=True)
    responder.outbox(sender).put([output("b")], last=True)
    drain(responder)
    assert sender.texts == ["b"]


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "send", "wait", "announce"]), st.integers(0, 2)), min_size=1, max_size=60
)


@given(_ACTIONS, st.sampled_from([0.0, 1.0]), st.booleans(), st.booleans())
def test_all_that_is_produced_is_sent_once_and_in_order(
    actions: list[tuple[str, int]], interval: float, hold: bool, fails: bool
) -> None:
    clock = Clock()
    responder = Responder(clock)
    senders = [Sender() for _ in range(3)]
    outboxes: list[Outbox] = [responder.outbox(sender, hold=hold, interval=interval) for sender in senders]
    produced = ["", "", ""]
    for number, (action, index) in enumerate(actions):
        if action == "put":
            produced[index] += f"{number},"
            outboxes[index].put([output(f"{number},")], last=False)
        elif action == "send":
            responder.send_next()
        elif action == "announce" and not hold:
            outboxes[index].announce()
        else:
            clock.now += 0.4
    for outbox in outboxes:
        if fails:
            outbox.fail(FAILURE)
        outbox.put([], last=True)
    drain(responder)
    for sender, text in zip(senders, produced, strict=True):
        assert "".join(sender.texts) == text
        assert sender.finals == [False] * (len(sender.finals) - 1) + [True]
        assert (sender.error is FAILURE) == fails


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 4), st.integers(1, 200))
def test_threads_that_produce_while_it_sends_lose_nothing(producers: int, count: int) -> None:
    responder = Responder()
    senders = [Sender() for _ in range(producers)]
    responder.start()

    def produce(sender: Sender) -> None:
        outbox = responder.outbox(sender)
        for number in range(count):
            outbox.put([output(f"{number},")], last=number + 1 == count)

    threads = [threading.Thread(target=produce, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sender.ended.wait(60) for sender in senders)
    responder.stop()
    expected = "".join(f"{number}," for number in range(count))
    assert ["".join(sender.texts) for sender in senders] == [expected] * producers
    assert [sum(sender.finals) for sender in senders] == [1] * producers


class Consumer:
    """Takes responses when it is told to, and says how many it took."""

    def __init__(self) -> None:
        self.count = 0

    def taken(self, sent: int) -> bool:
        return self.count >= sent


def test_nothing_follows_a_response_that_was_not_taken() -> None:
    clock, sender, consumer = Clock(), Sender(), Consumer()
    responder = Responder(clock)
    outbox = responder.outbox(sender, taken=consumer.taken)
    for text in "abc":
        outbox.put([output(text)], last=False)
        drain(responder)
    assert sender.texts == ["a"]
    consumer.count = 1
    clock.now += TAKEN_POLL
    drain(responder)
    assert sender.texts == ["a", "bc"]
    # The last one waits too.
    outbox.put([output("d")], last=True)
    drain(responder)
    assert sender.texts == ["a", "bc"]
    consumer.count = 2
    clock.now += TAKEN_POLL
    drain(responder)
    assert sender.texts == ["a", "bc", "d"]
    assert sender.finals == [False, False, True]


def test_one_who_takes_nothing_holds_nobody_else() -> None:
    responder, slow, quick = Responder(), Sender(), Sender()
    held = responder.outbox(slow, taken=Consumer().taken)
    free = responder.outbox(quick)
    for text in "abc":
        held.put([output(text)], last=False)
        free.put([output(text)], last=False)
        drain(responder)
    assert slow.texts == ["a"]
    assert quick.texts == ["a", "b", "c"]


def test_one_who_takes_nothing_is_not_waited_for_for_ever() -> None:
    clock, sender = Clock(), Sender()
    responder = Responder(clock)
    outbox = responder.outbox(sender, taken=Consumer().taken)
    for text in "abc":
        outbox.put([output(text)], last=text == "c")
        drain(responder)
    clock.now += TAKEN_LIMIT
    drain(responder)
    assert sender.texts == ["a", "bc"]


def test_the_thread_looks_again_at_what_was_not_taken() -> None:
    responder, sender, consumer = Responder(), Sender(), Consumer()
    responder.start()
    outbox = responder.outbox(sender, taken=consumer.taken)
    for text in "abc":
        outbox.put([output(text)], last=text == "c")
    consumer.count = 1
    assert sender.ended.wait(60)
    responder.stop()
    assert "".join(sender.texts) == "abc"


def test_stop_sends_to_no_consumer_that_is_behind() -> None:
    responder, sender, consumer = Responder(), Sender(), Consumer()
    outbox = responder.outbox(sender, taken=consumer.taken)
    outbox.put([output("a")], last=False)
    responder.send_next()
    outbox.put([output("b")], last=True)
    responder.start()
    responder.stop(0.1)
    assert sender.texts == ["a"]
    consumer.count = 1
    responder.stop(60)
    assert sender.texts == ["a", "b"]


def test_stop_sends_what_is_ready() -> None:
    responder, sender = Responder(), Sender()
    responder.outbox(sender).put([output("a")], last=True)
    responder.start()
    responder.stop()
    assert sender.texts == ["a"]
