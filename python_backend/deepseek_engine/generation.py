"""One request between its client and the engine: what goes in, and how outputs become responses."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from piccard_contract.errors import ErrorCode, RequestError
from piccard_contract.request import GenerateRequest
from piccard_contract.response import Choice, Response, Usage
from piccard_contract.routing import RouteReason
from piccard_contract.sampling import SamplingParams

from deepseek_engine.prompt import Prompt
from deepseek_engine.request import EngineOutput, EngineRequest, TokenLogprob
from deepseek_engine.text.output_text import OutputText
from deepseek_engine.text.reasoning import ReasoningParser

if TYPE_CHECKING:
    from deepseek_engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _ChoiceState:
    """What is known of a choice so far; a response repeats its end and its sum."""

    num_output: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    # What the engine's sum holds of tokens that were generated elsewhere.
    logprob_elsewhere: float | None = None
    reasoning: ReasoningParser | None = None


@dataclass(slots=True)
class _Told:
    """What is told once, with the first response."""

    prompt: str = ""
    cancel_token: str | None = None
    route_reason: str | None = None


class Generation:
    """One request of a version.

    Args:
        request: as the client or the router sent it.
        prompt: its prompt.
        tokenizer: the version's.
        id: unique in this process.
        version: the number that is told as served_version.
        cancel_token: ends the generation.
        direct: whether the version was called itself, without a router.

    Attributes:
        usage: totals so far.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        tokenizer: "Tokenizer",
        *,
        id: str,
        version: int,
        cancel_token: str,
        direct: bool,
    ) -> None:
        self.id = id
        self.request = request
        self.cancel_token = cancel_token
        self.usage = Usage(len(prompt.ids), len(request.output_ids) * request.sampling.n)
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._version = version
        self._choices = [_ChoiceState(len(request.output_ids)) for _ in range(request.sampling.n)]
        if request.extensions.separate_reasoning:
            for choice in self._choices:
                choice.reasoning = self._reasoning_parser()
        self._first = _Told(
            (request.text or "") if request.repeat_prompt else "",
            cancel_token,
            RouteReason.DIRECT.value if direct else None,
        )

    def engine_request(self) -> EngineRequest:
        """What the engine is asked for."""
        claims = self.request.extensions.attempt or self.request.extensions.gateway
        return EngineRequest(
            id=self.id,
            prompt_ids=self._prompt.ids,
            params=self._engine_params(),
            output_ids=list(self.request.output_ids),
            priority=claims.priority if claims else 0,
            salt=claims.tenant if claims else "",
        )

    def respond(self, outputs: list[EngineOutput], error: RequestError | None = None) -> Response:
        """The response that tells `outputs`, in their order, and the error that ended the request."""
        choices = [Choice() for _ in self._choices]
        prompt_logprobs = None
        for output in outputs:
            self._take(output, choices[output.choice], self._choices[output.choice])
            if output.prompt_logprobs is not None:
                prompt_logprobs = [_logprobs(position) if position else None for position in output.prompt_logprobs]
        for choice, state in zip(choices, self._choices, strict=True):
            if error is not None and error.code is ErrorCode.CANCELLED and state.finish_reason is None:
                state.finish_reason = "abort"
            choice.text = self._first.prompt + choice.text
            choice.finish_reason = state.finish_reason
            choice.stop_reason = state.stop_reason
            choice.cumulative_logprob = state.cumulative_logprob
            if choice.logprobs is None and self.request.sampling.logprobs is not None:
                choice.logprobs = []
        self.usage.completion_tokens = sum(state.num_output for state in self._choices)
        told, self._first = self._first, _Told()
        return Response(
            choices=choices,
            usage=Usage(self.usage.prompt_tokens, self.usage.completion_tokens, self.usage.cached_tokens),
            served_version=self._version,
            route_reason=told.route_reason,
            cancel_token=told.cancel_token,
            error=error,
            prompt_logprobs=prompt_logprobs,
        )

    def _take(self, output: EngineOutput, choice: Choice, state: _ChoiceState) -> None:
        self._add_text(output, choice, state)
        choice.token_ids.extend(output.token_ids)
        if output.logprobs is not None and self.request.sampling.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + [_logprobs(position) for position in output.logprobs]
        if output.cumulative_logprob is not None:
            state.cumulative_logprob = self._own_logprob(output, output.cumulative_logprob, state)
        state.num_output = output.num_output_tokens
        self.usage.cached_tokens = max(self.usage.cached_tokens, output.num_cached_tokens)
        if output.finish_reason in ("stop", "length", "abort"):
            state.finish_reason, state.stop_reason = output.finish_reason, output.stop_reason

    def _own_logprob(self, output: EngineOutput, total: float, state: _ChoiceState) -> float:
        """The sum over tokens that this version generated: the router adds what it had before a resume."""
        if state.logprob_elsewhere is None:
            # The chosen token stands first at each position.
            new = sum(next(iter(position.values())).logprob for position in output.logprobs or [])
            state.logprob_elsewhere = total - new if self.request.output_ids else 0.0
        return total - state.logprob_elsewhere

    def _add_text(self, output: EngineOutput, choice: Choice, state: _ChoiceState) -> None:
        if state.reasoning is None:
            choice.text += output.text
            return
        deltas = [state.reasoning.push(output.text)]
        # After a failure the version that goes on tells what is held back.
        if output.finish_reason not in (None, "error"):
            deltas.append(state.reasoning.flush())
        for delta in deltas:
            choice.reasoning += delta.reasoning
            choice.text += delta.answer

    def _engine_params(self) -> SamplingParams:
        params = self.request.sampling
        if params.logprobs is None and "cumulative_logprob" in self.request.returns:
            # The engine sums what it computes: the chosen token's log-probability alone is enough.
            return params.model_copy(update={"logprobs": 0})
        return params

    def _reasoning_parser(self) -> ReasoningParser:
        """Starts after the prompt and after what was told elsewhere of the tokens that are resumed from."""
        params = self.request.sampling
        told = OutputText(
            self._tokenizer,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        seen, _ = told.push(self.request.output_ids)
        prompt = self._prompt.text
        if prompt is None:
            prompt = self._tokenizer.decode(self._prompt.ids, skip_special_tokens=False)
        return ReasoningParser(ReasoningParser.prompt_opens_reasoning(prompt), seen=seen)


def _logprobs(position: dict[int, TokenLogprob]) -> dict[str, Any]:
    """One position as Triton's vLLM backend writes it."""
    return {
        str(token_id): {"logprob": item.logprob, "rank": item.rank, "decoded_token": item.decoded_token}
        for token_id, item in position.items()
    }
