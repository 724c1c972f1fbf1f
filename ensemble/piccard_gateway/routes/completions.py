"""POST /v1/completions."""

import asyncio
from typing import Any

from piccard_contract.errors import ErrorCode
from starlette.requests import Request
from starlette.responses import Response

from piccard_gateway.caller import caller_of
from piccard_gateway.catalogue import Offer
from piccard_gateway.completion_format import CompletionFormat
from piccard_gateway.completion_run import CompletionRun
from piccard_gateway.errors import refused
from piccard_gateway.fill_in_middle import with_gap
from piccard_gateway.gateway import Gateway, Incoming, now
from piccard_gateway.schemas import CompletionBody, read_body

PATH = "/v1/completions"


async def answer(request: Request) -> Response:
    """Continue texts, or fill the gap between two."""
    gateway = request.app.state.gateway
    body = read_body(CompletionBody, await request.body())
    incoming = Incoming(gateway, body, request.headers, caller_of(request.scope))
    offer, request_id = incoming.offer(), incoming.request_id()
    sampling, prompts = body.sampling(), body.prompts()
    if body.suffix:
        await _check_suffix(gateway, offer, body, prompts)
    echoes = _echoes(body, prompts)
    asked = [
        incoming.generation(offer, sampling, _id_of(request_id, number, len(prompts)), **_prompt(body, prompt))
        for number, prompt in enumerate(prompts)
    ]
    usage = bool(body.stream_options and body.stream_options.include_usage)
    format = CompletionFormat(
        f"cmpl-{request_id}",
        now(),
        body.model,
        top=body.logprobs,
        usage=usage,
        choices=sampling.get("n", 1),
        echoes=echoes,
    )
    run = CompletionRun(gateway.generator, asked, format, request_id=request_id, usage=usage)
    return run.answer(stream=bool(body.stream))


def _prompt(body: CompletionBody, prompt: str | list[int]) -> dict[str, Any]:
    if isinstance(prompt, list):
        return {"input_ids": prompt}
    return {"text": with_gap(prompt, body.suffix) if body.suffix else prompt}


async def _check_suffix(gateway: Gateway, offer: Offer, body: CompletionBody, prompts: list[str | list[int]]) -> None:
    if body.echo:
        raise refused(ErrorCode.CONFLICTING_INPUTS, "suffix and echo exclude each other; leave one out", "echo")
    if any(isinstance(prompt, list) for prompt in prompts):
        raise refused(ErrorCode.UNSUPPORTED, "suffix needs a prompt of text, not of token ids", "suffix")
    versions = offer.serving if body.version is None else [body.version]
    # A tokenizer's file may be megabytes.
    await asyncio.to_thread(gateway.gaps.check, offer.service, versions)


def _echoes(body: CompletionBody, prompts: list[str | list[int]]) -> list[str]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not body.echo:
        return []
    if len(texts) < len(prompts):
        raise refused(ErrorCode.UNSUPPORTED, "echo needs a prompt of text, not of token ids", "echo")
    return texts


def _id_of(request_id: str, number: int, prompts: int) -> str:
    """An id for each prompt, so that the request log tells them apart."""
    return request_id if prompts == 1 else f"{request_id[:240]}-{number}"
