"""Asks the versions of a rollout how likely they find the continuations of golden prompts.

A continuation's log-probability is that of prompt and continuation less that of the prompt alone (the chain rule), so
that it does not matter whether a tokenizer puts a token before every text, which decides whether the first one counts.
"""

import threading
from collections.abc import Iterator, Sequence

from piccard_canary.rollout.golden import GoldenComparison, GoldenScore
from piccard_contract.home import Service
from piccard_contract.reports import SupervisorReport
from piccard_contract.request import RequestExtensions

from piccard.errors import OperationError
from piccard.keys import own_claims
from piccard.operation import sections_of
from piccard.probe import ProbeError, generate_once
from piccard.rollout.golden_prompts import Chat, GoldenPrompt, golden_prompts

# Each step is worth a second of waiting: whoever comes up to ten seconds later goes first.
PRIORITY = 10

# Seconds for each answer, waiting behind callers included.
TIMEOUT = 60.0


class EndedError(OperationError):
    """Nobody waits for the answers any more."""


def compare(service: Service, canary: int, stable: int, ending: threading.Event) -> GoldenComparison:
    """What both versions make of the service's golden prompts, asked one after the other and not by the router.

    Nothing of it is in the request log or counted for a tenant. What keeps it from an end is told as its problem.

    Args:
        ending: set once nobody waits for it any more.
    """
    try:
        prompts = golden_prompts(service)
        pairs = list(_pairs(service, canary, stable, prompts, ending))
    except OperationError as error:
        return GoldenComparison(problem=str(error))
    return GoldenComparison(
        canary=[pair[0] for pair in pairs],
        stable=[pair[1] for pair in pairs],
        text_bytes=[len(prompt.continuation.encode()) for prompt in prompts],
    )


def _pairs(
    service: Service, canary: int, stable: int, prompts: Sequence[GoldenPrompt], ending: threading.Event
) -> Iterator[tuple[GoldenScore, GoldenScore]]:
    address = _address(service)
    for number, prompt in enumerate(prompts, start=1):
        scores = []
        for version in (canary, stable):
            if ending.is_set():
                raise EndedError("the golden prompts are not wanted any more")
            try:
                scores.append(_score(address, service, version, prompt))
            except ProbeError as error:
                raise ProbeError(f"version {version} does not answer golden prompt {number}: {error}") from error
        yield scores[0], scores[1]


def _address(service: Service) -> str:
    section = sections_of(service).get("supervisor")
    address = SupervisorReport.model_validate(section.data).grpc if section is not None else ""
    if not address:
        raise OperationError("no server is known that could answer golden prompts; run `piccard serve`")
    return address


def _score(address: str, service: Service, version: int, prompt: GoldenPrompt) -> GoldenScore:
    begun, _ = _logprobs(address, service, version, prompt.before, complete=False)
    all_of_it, pieces = _logprobs(address, service, version, prompt.whole, complete=True)
    tokens = len(all_of_it) - len(begun)
    if tokens < 1:
        raise ProbeError("the continuation adds no token to the prompt; make it longer")
    return GoldenScore(sum(all_of_it) - sum(begun), tuple(pieces), tokens)


def _logprobs(
    address: str, service: Service, version: int, prompt: Chat, *, complete: bool
) -> tuple[list[float], list[str]]:
    """Log-probabilities and texts of the tokens of a prompt but the first."""
    answer = generate_once(
        address,
        service.llm,
        prompt,
        1,
        TIMEOUT,
        version=version,
        claims=own_claims(service, PRIORITY),
        sampling={"prompt_logprobs": 0},
        extensions=RequestExtensions(add_generation_prompt=not complete),
    )
    if answer.status.get("code") != "OK":
        raise ProbeError(f"{answer.status.get('code', 'no status')} {answer.status.get('message', '')}".strip())
    positions = answer.details.get("prompt_logprobs")
    if not positions:
        raise ProbeError("it tells no log-probabilities of a prompt")
    # The token itself stands first at each position.
    told = [next(iter(position.values())) for position in positions if position]
    return [float(token["logprob"]) for token in told], [str(token["decoded_token"]) for token in told]
