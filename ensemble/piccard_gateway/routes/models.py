"""GET /v1/models and /v1/models/NAME."""

from typing import Any

from fastapi import APIRouter, Request

from piccard_gateway.caller import caller_of
from piccard_gateway.catalogue import Offer
from piccard_gateway.errors import ApiError

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The services that the caller may ask."""
    caller = caller_of(request.scope)
    offers = request.app.state.gateway.catalogue.offers()
    return {"object": "list", "data": [_told(offer) for name, offer in offers.items() if caller.may_ask(name)]}


@router.get("/v1/models/{name}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """One service."""
    offer = request.app.state.gateway.catalogue.find(name)
    if offer is None or not caller_of(request.scope).may_ask(name):
        raise ApiError(404, "model_not_found", f"there is no model {name[:64]!r}", "model")
    return _told(offer)


def _told(offer: Offer) -> dict[str, Any]:
    return {"id": offer.service.name, "object": "model", "created": offer.created, "owned_by": "piccard"}
