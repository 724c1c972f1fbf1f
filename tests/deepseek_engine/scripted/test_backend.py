import subprocess
import sys
from typing import Any

import pytest
from deepseek_engine.failures import breaks_the_device
from deepseek_engine.request import EngineOutput
from deepseek_engine.scripted import ScriptedBackend, ScriptedRequest, WordTokenizer
from hypothesis import given
from hypothesis import strategies as st
from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.sampling import SamplingParams

WORDS = WordTokenizer()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A scripted backend under a clock of its own, run to the end of what it was asked."""

    def __init__(self, version: int = 1) -> None:
        self.clock = Clock()
        self.deaths = 0
        self.stuck = 0
        self.backend = ScriptedBackend(
            WORDS, version=version, max_model_len=1000, clock=self.clock, die=self._die, stick=self._stick
        )

    def _die(self) -> None:
        self.deaths += 1

    def _stick(self) -> None:
        self.stuck += 1

    def add(
        self,
        prompt: str = "one two three",
        *,
        id: str = "a",
        output_ids: tuple[int, ...] = (),
        script: Any = None,
        **params: Any,
    ) -> None:
        params.setdefault("max_tokens", 50)
        self.backend.add(
            ScriptedRequest(
                id, WORDS.encode(prompt), SamplingParams(**params), output_ids=list(output_ids), script=script
            )
        )

    def run(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        while self.backend.has_work() and self.backend.pause() < 1e6:
            self.clock.now += self.backend.pause()
            outputs += self.backend.step()
        return outputs


def play(version: int = 1, **request: Any) -> list[EngineOutput]:
    stage = Stage(version)
    stage.add(**request)
    return stage.run()


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_the_words_of_the_prompt_are_repeated_up_to_the_natural_end() -> None:
    outputs = play(script={"tokens": 5})
    assert text_of(outputs) == " one two three one two"
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["stop"]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4, 5]


def test_max_tokens_ends_it_earlier() -> None:
    outputs = play(script={"tokens": 5}, max_tokens=2)
    assert (len(outputs), outputs[-1].finish_reason) == (2, "length")


def test_ignore_eos_goes_on_past_the_natural_end() -> None:
    outputs = play(script={"tokens": 5}, max_tokens=9, ignore_eos=True)
    assert (len(outputs), outputs[-1].finish_reason) == (9, "length")


def test_min_tokens_puts_the_natural_end_off() -> None:
    assert len(play(script={"tokens": 2}, min_tokens=4)) == 4


def test_a_text_of_the_script_replaces_the_prompt() -> None:
    assert text_of(play(script={"tokens": 3, "text": "x y"})) == " x y x"


def test_a_stop_string_ends_the_text_and_is_left_out() -> None:
    outputs = play(stop=["two t"])
    assert text_of(outputs) == " one "
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", "two t")


def test_a_stop_token_ends_it() -> None:
    (two,) = WORDS.encode(" two")
    outputs = play(stop_token_ids=[two])
    assert (len(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason) == (2, "stop", two)


def test_choices_differ_and_each_ends() -> None:
    outputs = play(script={"tokens": 2}, n=2)
    assert text_of([output for output in outputs if output.choice == 0]) == " one two"
    assert text_of([output for output in outputs if output.choice == 1]) == " two three"
    assert sum(output.finish_reason == "stop" for output in outputs) == 2


@given(st.text(min_size=1, max_size=40).filter(lambda text: text.strip() != ""), st.integers(0, 12), st.booleans())
def test_a_resumed_request_equals_the_unbroken_one(prompt: str, cut: int, tag: bool) -> None:
    script = {"tokens": 12, "tag": tag}
    whole = play(prompt=prompt, script=script, stop=["abc"])
    head, ids = whole[:cut], ids_of(whole[:cut])
    if head and head[-1].finish_reason:
        return
    tail = play(prompt=prompt, script=script, stop=["abc"], output_ids=tuple(ids))
    assert ids + ids_of(tail) == ids_of(whole)
    assert text_of(head) + text_of(tail) == text_of(whole)
    assert tail[-1].num_output_tokens == whole[-1].num_output_tokens
    assert tail[-1].finish_reason == whole[-1].finish_reason


def test_what_had_ended_elsewhere_ends_at_once() -> None:
    ids = tuple(ids_of(play(script={"tokens": 4})))
    outputs = play(script={"tokens": 4}, output_ids=ids)
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "stop")]


@pytest.mark.parametrize("at", [0, 3])
def test_it_fails_at_a_token(at: int) -> None:
    outputs = play(script={"fail_at": at, "error": "OUT_OF_MEMORY"})
    assert len(ids_of(outputs)) == at
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error is not None
    assert outputs[-1].error.code is ErrorCode.OUT_OF_MEMORY


def test_positions_count_the_tokens_that_are_resumed_from() -> None:
    ids = tuple(ids_of(play())[:3])
    assert len(ids_of(play(script={"fail_at": 5}, output_ids=ids))) == 2


def test_a_version_can_have_settings_of_its_own() -> None:
    script = {"tokens": 4, "versions": {"2": {"fail_at": 1}}}
    assert play(1, script=script)[-1].finish_reason == "stop"
    assert play(2, script=script)[-1].finish_reason == "error"


def test_tags_tell_the_version_in_every_token() -> None:
    outputs = play(2, prompt="a longerword b", script={"tokens": 3, "tag": True})
    assert all(WORDS.token_text(token_id).endswith("@2") for token_id in ids_of(outputs))


def test_it_dies_at_a_token() -> None:
    stage = Stage()
    stage.add(script={"die_at": 2, "tokens": 3})
    stage.backend.step()
    assert stage.deaths == 0
    stage.run()
    assert stage.deaths == 1


def test_the_engine_sticks_or_breaks_at_a_token() -> None:
    stage = Stage()
    stage.add(script={"stick_at": 1, "tokens": 2})
    stage.run()
    assert stage.stuck == 1
    stage.add(script={"break_at": 2, "tokens": 3})
    with pytest.raises(MemoryError):
        stage.run()
    stage = Stage()
    stage.add(script={"lose_at": 1, "tokens": 3})
    with pytest.raises(RuntimeError) as caught:
        stage.run()
    assert breaks_the_device(caught.value)


def test_what_hangs_ends_by_its_abort() -> None:
    stage = Stage()
    stage.add(script={"hang_at": 2})
    assert len(ids_of(stage.run())) == 2
    assert stage.backend.has_work()
    stage.backend.abort("a")
    assert [output.finish_reason for output in stage.backend.step()] == ["abort"]
    assert not stage.backend.has_work()


def test_requests_advance_together_each_at_its_pace() -> None:
    stage = Stage()
    stage.add(id="slow", script={"tokens": 3, "delay_s": 2.0, "first_delay_s": 1.0})
    stage.add(id="fast", script={"tokens": 3, "delay_s": 0.5})
    order = [output.request_id for output in stage.run()]
    assert order == ["fast", "fast", "slow", "fast", "slow", "slow"]
    assert stage.clock.now == pytest.approx(105.0)


@given(st.lists(st.integers(0, 5), max_size=20))
def test_blocks_return_whatever_ends_first(aborts: list[int]) -> None:
    stage = Stage()
    free = stage.backend.stats().free_blocks
    for number in range(6):
        stage.add(id=str(number), script={"tokens": 3 + 40 * number})
    assert stage.backend.stats().free_blocks < free
    for number in aborts:
        stage.clock.now += 0.01
        stage.backend.step()
        stage.backend.abort(str(number))
    stage.run()
    assert (stage.backend.stats().free_blocks, stage.backend.stats().running) == (free, 0)


def test_log_probabilities_come_where_they_are_asked_for() -> None:
    outputs = play(script={"tokens": 2}, logprobs=1, prompt_logprobs=0)
    one, two, _ = WORDS.encode(" one two three")
    assert outputs[0].logprobs is not None
    assert [(item.rank, item.logprob) for item in outputs[0].logprobs[0].values()] == [(1, -0.25), (2, -0.5)]
    assert list(outputs[0].logprobs[0]) == [one, two]
    assert outputs[1].cumulative_logprob == -0.5
    assert outputs[0].prompt_logprobs is not None
    assert [None if position is None else len(position) for position in outputs[0].prompt_logprobs] == [None, 1, 1]
    assert outputs[1].prompt_logprobs is None


@pytest.mark.parametrize("script", [{"tokens": 0}, {"unknown": 1}, {"error": "NO_SUCH"}, {"versions": {"1": {"x": 1}}}])
def test_a_script_that_cannot_be_read_is_refused(script: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        Stage().add(script=script)
    assert refusal.value.code is ErrorCode.INVALID_VALUE
    assert "extensions.script" in refusal.value.message


def test_a_scripted_version_starts_without_torch() -> None:
    code = (
        "import sys; import deepseek_engine.version_server, deepseek_engine.scripted.version; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
