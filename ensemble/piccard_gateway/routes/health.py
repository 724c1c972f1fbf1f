"""GET /health."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 where the server behind this can be reached, else 503; whether a service answers is told by /readyz."""
    live = await request.app.state.gateway.generator.live()
    return JSONResponse({"status": "ok" if live else "the server cannot be reached"}, 200 if live else 503)
