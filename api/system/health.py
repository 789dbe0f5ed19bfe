"""GET /health, /ready, /metrics and /version: never wait for anything."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from api.dependencies import CallerDep, HealthDep, ServicesDep
from api.http.json_response import json_answer

router = APIRouter()

_VERSION = version("penstock")


@router.api_route("/health", methods=["GET", "HEAD"])
async def health(caller: CallerDep, monitor: HealthDep) -> Response:
    """This process lives: 200. `status` is the deployment's state; the rest needs a key, where
    there are keys."""
    payload = monitor.payload()
    if not caller.sees_details:
        payload = {"status": payload["status"]}
    return json_answer(payload)


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(services: ServicesDep) -> Response:
    """200 when requests are accepted here now, else 503: no model is known, Redis is away or this
    frontend is going down. Requests for `unserved` models wait until a worker comes."""
    is_ready = services.is_ready
    payload = {
        "ready": is_ready,
        "closed": services.open_requests.closed,
        "status": services.health.status,
        "models": list(services.catalog.known),
        "unserved": [name for name, model in services.catalog.known.items() if not model.is_served],
    }
    response = json_answer(payload, 200 if is_ready else 503)
    if not is_ready:
        response.headers["retry-after"] = "1"
    return response


@router.get("/version")
async def release() -> Response:
    """Returns the release of this frontend, in vLLM's shape."""
    return json_answer({"version": _VERSION})


@router.get("/metrics")
async def metrics(services: ServicesDep) -> Response:
    """The Prometheus text format; docs: the table in `api.metrics`."""
    return Response(
        services.metrics.exposition(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )
