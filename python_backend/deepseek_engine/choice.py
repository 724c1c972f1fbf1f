"""One choice of a request on the engine's side of the seam: its text, its log-probabilities and when it ends."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepseek_engine.request import EngineOutput, FinishReason, TokenLogprob
from deepseek_engine.sequence import Sequence
from deepseek_engine.step_plan import RowLogprobs
from deepseek_engine.text.output_text import OutputText

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Finish:
    """How a choice ended."""

    reason: FinishReason
    stop: int | str | None = None


class Choice:
    """Turns the tokens of one sequence into outputs.

    Args:
        sequence: the scheduler's side; the tokens generated elsewhere are in it already.
        tokenizer: for text.
        eos_ids: end-of-sequence ids.

    Attributes:
        finish: how it ended, or None while it runs. Tokens generated elsewhere may have ended it already.
        owed: text to be told with that end. Whoever generated the tokens sent what they released, and not what the
            end releases, for with the end it would have sent that the request is over.
    """

    def __init__(self, sequence: Sequence, tokenizer: "Tokenizer", eos_ids: frozenset[int]) -> None:
        self.sequence = sequence
        self.finish: Finish | None = None
        self.owed = ""
        self._tokenizer = tokenizer
        params = sequence.params
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._cumulative = 0.0 if params.logprobs is not None else None
        self._tells_prompt = params.prompt_logprobs is not None and sequence.choice == 0 and not sequence.num_resumed
        # Of the first token nothing predicts.
        self._prompt_logprobs: list[dict[int, TokenLogprob] | None] = [None]
        resumed = sequence.token_ids[sequence.num_prompt :]
        self._text = self._output_text(resumed[:-1]) if params.detokenize else None
        if self._text is not None and self._text.stop is not None:
            self.finish = Finish("stop", self._text.stop)
        elif resumed:
            _, self.owed = self._end_with(resumed[-1])

    def _output_text(self, output_ids: list[int]) -> OutputText:
        params = self.sequence.params
        return OutputText(
            self._tokenizer,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            output_ids=output_ids,
        )

    def take_known(self, logprobs: RowLogprobs) -> None:
        """Take log-probabilities of tokens that were known: of the prompt, or of those generated elsewhere."""
        if self.sequence.num_resumed:
            self._cumulative = (self._cumulative or 0.0) + sum(values[0] for values in logprobs.logprobs)
            return
        self._prompt_logprobs.extend(self._told(logprobs, index) for index in range(len(logprobs.ranks)))

    def take(self, token_ids: list[int], logprobs: RowLogprobs | None) -> EngineOutput:
        """Take sampled tokens; those past the end are dropped."""
        text = ""
        taken = 0
        for token_id in token_ids:
            self.sequence.token_ids.append(token_id)
            taken += 1
            released, held = self._end_with(token_id)
            text += released + held
            if self.finish is not None:
                break
        output = self.output(token_ids[:taken], text)
        if logprobs is not None and self._cumulative is not None:
            output.logprobs = [self._told(logprobs, index) for index in range(taken)]
            self._cumulative += sum(values[0] for values in logprobs.logprobs[:taken])
            output.cumulative_logprob = self._cumulative
        if self._tells_prompt:
            output.prompt_logprobs, self._tells_prompt = self._prompt_logprobs, False
        return output

    def output(self, token_ids: list[int], text: str) -> EngineOutput:
        """An output with the choice's counts and, where it has just ended, its end."""
        sequence, finish = self.sequence, self.finish
        num_prompt, num_cached = sequence.num_prompt, sequence.num_cached
        return EngineOutput(
            request_id=sequence.request_id,
            choice=sequence.choice,
            token_ids=token_ids,
            text=text,
            num_prompt_tokens=num_prompt,
            num_output_tokens=len(sequence.token_ids) - num_prompt,
            # Of tokens generated elsewhere some may have been there too.
            num_cached_tokens=num_cached if num_cached < num_prompt else num_prompt,
            cumulative_logprob=self._cumulative,
            finish_reason=None if finish is None else finish.reason,
            stop_reason=None if finish is None else finish.stop,
        )

    def held_text(self) -> str:
        """What the text still holds back, for a choice that ends before its time."""
        return "" if self._text is None else self._text.flush()

    def _end_with(self, token_id: int) -> tuple[str, str]:
        """See whether the sequence ends with its last token; returns the text that this token and the end release.

        A stop token's own text is left out unless it was asked for.
        """
        self.finish = self._end_of(token_id)
        if self._text is None:
            return "", ""
        released = ""
        stopped = self.finish is not None and self.finish.reason == "stop"
        if not stopped or self.sequence.params.include_stop_str_in_output:
            released, stop = self._text.push((token_id,))
            if stop is not None:
                self.finish = Finish("stop", stop)
        return released, "" if self.finish is None else self._text.flush()

    def _end_of(self, token_id: int) -> Finish | None:
        """How the sequence ends with `token_id` as its last token, stop strings apart."""
        sequence = self.sequence
        num_output = sequence.num_output
        if num_output >= sequence.params.min_tokens:
            if token_id in self._eos_ids:
                return Finish("stop")
            if token_id in self._stop_ids:
                return Finish("stop", token_id)
        return Finish("length") if num_output >= sequence.max_output else None

    def _told(self, logprobs: RowLogprobs, index: int) -> dict[int, TokenLogprob]:
        ids, values = logprobs.token_ids[index], logprobs.logprobs[index]
        ranks = (logprobs.ranks[index], *range(1, len(ids)))
        # A chosen token that is also among the most likely has its rank there, as in vLLM.
        return {
            token_id: TokenLogprob(token_id, value, rank, self._tokenizer.token_text(token_id))
            for token_id, value, rank in zip(ids, values, ranks, strict=True)
        }
