"""POST /v1/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from piccard_gateway.caller import caller_of
from piccard_gateway.chat_format import ChatFormat
from piccard_gateway.completion_run import CompletionRun
from piccard_gateway.gateway import Incoming, now
from piccard_gateway.schemas import ChatBody, read_body

PATH = "/v1/chat/completions"


async def answer(request: Request) -> Response:
    """Continue a chat."""
    gateway = request.app.state.gateway
    body = read_body(ChatBody, await request.body())
    incoming = Incoming(gateway, body, request.headers, caller_of(request.scope))
    offer, request_id = incoming.offer(), incoming.request_id()
    incoming.check_messages(body.messages)
    asked = incoming.generation(offer, body.sampling(), request_id, messages=body.messages)
    usage = bool(body.stream_options and body.stream_options.include_usage)
    top = (body.top_logprobs or 0) if body.logprobs else None
    format = ChatFormat(f"chatcmpl-{request_id}", now(), body.model, top=top, usage=usage)
    run = CompletionRun(gateway.generator, [asked], format, request_id=request_id, usage=usage)
    return run.answer(stream=bool(body.stream))
