"""A request's prompt as token ids."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import GenerateRequest
from piccard_contract.sampling import SamplingParams

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        ids: its tokens.
        text: what the client sent, or the rendered chat; None where it sent token ids.
    """

    ids: list[int]
    text: str | None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads the prompts of one version; safe to share between threads.

    Attributes:
        tokenizer: the checkpoint's.
        vocab_size: ids that the model knows.
        max_model_len: context in tokens.
    """

    tokenizer: "Tokenizer"
    vocab_size: int
    max_model_len: int

    def read(self, request: GenerateRequest) -> Prompt:
        """Token ids of the request's text, chat or ids, checked against the version.

        Raises:
            RequestError: MISSING_INPUT, INVALID_TOKEN, CONTEXT_LENGTH_EXCEEDED, or what tokenizer and template raise.
        """
        prompt = self._prompt(request)
        if not prompt.ids:
            raise RequestError(ErrorCode.MISSING_INPUT, "the prompt has no tokens; send a text that is not empty")
        self.tokenizer.check_ids(request.output_ids, self.vocab_size)
        self._check_bias(request)
        self._check_length(len(prompt.ids), request.sampling)
        return prompt

    def _prompt(self, request: GenerateRequest) -> Prompt:
        if request.input_ids is not None:
            # Far too many ids are not looked at one by one.
            self._check_length(len(request.input_ids), request.sampling)
            return Prompt(self.tokenizer.check_ids(request.input_ids, self.vocab_size), None)
        if request.messages is None:
            return Prompt(self._encode(request.text or ""), request.text)
        extensions = request.extensions
        text = self.tokenizer.chat_template.render(
            request.messages,
            add_generation_prompt=extensions.add_generation_prompt,
            **extensions.chat_template_kwargs,
        )
        # The template writes its own bos.
        return Prompt(self._encode(text, add_special_tokens=False), text)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > self.max_model_len:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt's {len(text)} characters are {fewest} tokens at least, more than the context of "
                f"{self.max_model_len} tokens; shorten it",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_bias(self, request: GenerateRequest) -> None:
        for name, ids in (
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.sampling.stop_token_ids),
        ):
            beyond = [token_id for token_id in ids if token_id >= self.vocab_size]
            if beyond:
                raise RequestError(
                    ErrorCode.INVALID_TOKEN,
                    f"{name} has token id {beyond[0]}; the vocabulary has ids 0 to {self.vocab_size - 1}",
                )

    def _check_length(self, num_prompt: int, sampling: SamplingParams) -> None:
        max_tokens, min_tokens = sampling.max_tokens, sampling.min_tokens
        room = self.max_model_len - num_prompt
        if (max_tokens or 1) <= room:
            if max_tokens is None and min_tokens > room:
                raise RequestError(
                    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                    f"min_tokens {min_tokens} is more than the {room} tokens that the context leaves; lower it",
                )
            return
        remedy = f"lower max_tokens to {room}" if room > 0 else f"shorten the prompt by {1 - room} tokens at least"
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt's {num_prompt} tokens and max_tokens {max_tokens or 1} are more than the context of "
            f"{self.max_model_len} tokens; {remedy}",
        )
