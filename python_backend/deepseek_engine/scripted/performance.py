"""One choice of a scripted request while it is played."""

from deepseek_engine.request import EngineError, EngineOutput, EngineRequest, FinishReason, TokenLogprob
from deepseek_engine.scripted.script import Script
from deepseek_engine.scripted.word_tokenizer import BYTES_PER_TOKEN, WordTokenizer
from deepseek_engine.text.output_text import OutputText

# Every token is told as this likely, so that sums are exact.
LOGPROB = -0.25


class Performance:
    """Plays a script for one choice.

    Choice c starts c words into the text, so that choices differ.

    Attributes:
        due: when the next token comes, by the backend's clock.
        num_output: output tokens so far, those generated elsewhere included.
        ended: whether its last output was made.
    """

    def __init__(
        self,
        request: EngineRequest,
        choice: int,
        script: Script,
        tokenizer: WordTokenizer,
        *,
        version: int,
        max_output: int,
        starts_at: float,
    ) -> None:
        self.script = script
        self.due = starts_at
        self.num_output = len(request.output_ids)
        self.ended = False
        self._request = request
        self._choice = choice
        self._tokenizer = tokenizer
        self._max_output = max_output
        self._words = _words(request, script, tokenizer, version)
        self._told_prompt = bool(request.output_ids)
        params = request.params
        self._text = OutputText(
            tokenizer,  # type: ignore[arg-type]
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            output_ids=request.output_ids,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache."""
        return len(self._request.prompt_ids) + self.num_output

    def next_token(self) -> EngineOutput:
        """The next token's output; no token where those generated elsewhere ended the text already."""
        finish = self._finish(None)
        if finish is not None:
            return self.output(text=self._text.flush(), finish_reason=finish[0], stop_reason=finish[1])
        token_id = self._word(self.num_output)
        text, _ = self._text.push([token_id])
        self.num_output += 1
        self.due += self.script.delay_s
        finish = self._finish(token_id)
        if finish is None:
            return self.output(token_id, text)
        return self.output(token_id, text + self._text.flush(), finish_reason=finish[0], stop_reason=finish[1])

    def fail(self) -> EngineOutput:
        """The output of a scripted failure."""
        output = self.output(finish_reason="error")
        output.error = EngineError(self.script.error, f"the script fails at token {self.num_output}")
        return output

    def output(
        self,
        token_id: int | None = None,
        text: str = "",
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> EngineOutput:
        """What is told of one token, or of the end."""
        self.ended = finish_reason is not None
        logprobs = self._request.params.logprobs
        return EngineOutput(
            request_id=self._request.id,
            choice=self._choice,
            token_ids=[] if token_id is None else [token_id],
            text=text if self._request.params.detokenize else "",
            num_prompt_tokens=len(self._request.prompt_ids),
            num_output_tokens=self.num_output,
            num_cached_tokens=0,
            logprobs=None if logprobs is None or token_id is None else [self._logprobs(token_id, logprobs)],
            cumulative_logprob=None if logprobs is None else LOGPROB * self.num_output,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _finish(self, token_id: int | None) -> tuple[FinishReason, int | str | None] | None:
        """Why the text ends here: with the stop string or token that ended it, or None where it goes on."""
        params = self._request.params
        if self._text.stop is not None:
            return "stop", self._text.stop
        if token_id in params.stop_token_ids and self.num_output > params.min_tokens:
            return "stop", token_id
        if not params.ignore_eos and self.num_output >= max(self.script.tokens, params.min_tokens):
            return "stop", None
        return ("length", None) if self.num_output >= self._max_output else None

    def _word(self, position: int) -> int:
        return self._words[(position + self._choice) % len(self._words)]

    def _logprobs(self, token_id: int, count: int) -> dict[int, TokenLogprob]:
        """The chosen token, then `count` words of the text that are told as ever less likely."""
        others = list(dict.fromkeys(word for word in self._words if word != token_id))[:count]
        ranked = enumerate([token_id, *others], start=1)
        return {
            word: TokenLogprob(word, LOGPROB * rank, rank, self._tokenizer.token_text(word)) for rank, word in ranked
        }

    def _prompt_logprobs(self) -> list[dict[int, TokenLogprob] | None] | None:
        count = self._request.params.prompt_logprobs
        if count is None or self._choice or self._told_prompt:
            return None
        self._told_prompt = True
        return [None, *(self._logprobs(token_id, count) for token_id in self._request.prompt_ids[1:])]


def _words(request: EngineRequest, script: Script, tokenizer: WordTokenizer, version: int) -> list[int]:
    """Ids of the words that are repeated; at least one."""
    text = tokenizer.decode(request.prompt_ids) if script.text is None else script.text
    ids = tokenizer.encode(" " + " ".join(text.split() or ["word"]))
    return [_tagged(token_id, tokenizer, version) for token_id in ids] if script.tag else ids


def _tagged(token_id: int, tokenizer: WordTokenizer, version: int) -> int:
    tag = f"@{version}"[:BYTES_PER_TOKEN]
    word = tokenizer.token_text(token_id).encode()[: BYTES_PER_TOKEN - len(tag)].decode("utf-8", "ignore")
    return tokenizer.encode(word + tag)[0]
