"""The ASGI application."""

import logging

from fastapi import FastAPI, HTTPException, Request
from piccard_contract.gateway_file import GatewayLimits
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from piccard_gateway.answer import Answer, send_error
from piccard_gateway.door import Door
from piccard_gateway.errors import ApiError
from piccard_gateway.gateway import Gateway
from piccard_gateway.key_ring import KeyRing
from piccard_gateway.routes import chat, completions, health, models

_log = logging.getLogger(__name__)


def make_app(gateway: Gateway, keys: KeyRing) -> ASGIApp:
    """The application over `gateway`, behind its door."""
    # A path with a slash too many is none: a redirect names whatever host the request did, and sends body and key on.
    app = FastAPI(title="Piccard", openapi_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    # FastAPI's own routes take half a millisecond of a first token for what these read themselves.
    for resource in (chat, completions):
        app.add_route(resource.PATH, resource.answer, methods=["POST"])
    for told in (models, health):
        app.include_router(told.router)
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(StarletteHTTPException, _tell_http)
    app.add_exception_handler(Exception, _tell_defect)

    def limits() -> GatewayLimits:
        return gateway.current().limits

    return Door(app, limits, keys)


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_answer(error)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    code, sentence = "not_found", f"there is no {what}; there are /v1/chat/completions, /v1/completions, /v1/models"
    if error.status_code == 405:
        code, sentence = "method_not_allowed", f"{what} is not possible; see the method that it takes"
    return _error_answer(ApiError(error.status_code, code, sentence))


async def _tell_defect(_: Request, error: Exception) -> Response:
    return _error_answer(ApiError(500, "internal", "a defect of the gateway; its log has the details"))


def _error_answer(error: ApiError) -> Response:
    return Answer(lambda send: send_error(send, error, []))
