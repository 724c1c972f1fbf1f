"""The text of one choice: detokeniser and stop strings together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepseek_engine.text.detokenizer import Detokenizer
from deepseek_engine.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer


class OutputText:
    """Turns the output ids of one choice into the text that its client gets.

    Held back are unfinished characters and endings that may become a stop string. What has been released after some ids
    depends on those ids alone, not on how they were cut into pushes. So a stream resumed from `output_ids` elsewhere
    goes on exactly where the first one ended: the ids are replayed and what they release is dropped, since the first
    one has sent it, while what they hold back is still to be sent.

    Stop tokens are the engine's: one whose text is not wanted is not pushed.

    Args:
        tokenizer: whose ids these are.
        stops: stop strings.
        include_stop_str_in_output: release the stop string too.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: stop strings completed within the first so many tokens are let pass, as vLLM does.
        output_ids: ids generated before, when the request is resumed.

    Attributes:
        stop: the stop string that was matched, or None.
        num_tokens: ids taken so far, `output_ids` included and those after the token that completed a stop string not.
        num_chars: characters released so far, those that `output_ids` had released included.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stops: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        output_ids: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include_stop_str_in_output) if stops else None
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_chars = 0
        self.push(output_ids)

    @property
    def stop(self) -> str | None:
        """The stop string that was matched, or None."""
        return self._stops.stop if self._stops else None

    def push(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Take ids that follow; returns the text to send now, and the stop string once one was matched.

        After a match nothing more is released; `num_tokens` tells which of the ids completed it.
        """
        if self._stops is None:
            self.num_tokens += len(ids)
            text = self._detokenizer.push(ids)
        else:
            text = "".join([self._push_one(token_id, self._stops) for token_id in ids])
        self.num_chars += len(text)
        return text, self.stop

    def flush(self) -> str:
        """What was held back, at the end: replacement characters for an unfinished one; nothing after a stop."""
        text = self._detokenizer.flush()
        if self._stops is not None:
            text = self._stops.push(text, match=False)[0] + self._stops.flush()
        self.num_chars += len(text)
        return text

    def _push_one(self, token_id: int, stops: StopStrings) -> str:
        if stops.stop is not None:
            return ""
        self.num_tokens += 1
        text = self._detokenizer.push((token_id,))
        return stops.push(text, match=self.num_tokens > self._min_tokens)[0]
