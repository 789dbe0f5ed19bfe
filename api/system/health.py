"""GET /health, /ready, /metrics and /version: never wait for anything."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from api.generation.models import GenerationDep
from api.http.caller import CallerDep
from api.http.json_response import json_response
from api.http.open_requests import OpenRequestsDep
from api.http.openapi import FREE, KEYED, errors, statuses
from api.metrics import MetricsDep
from api.system.health_monitor import HealthDep
from api.system.protocol import Health, Readiness, Version

router = APIRouter(tags=["Service"])

_NOT_READY = "Requests are not accepted here now."

_VERSION = version("penstock")


@router.get("/health", response_model=Health, responses=errors(KEYED), operation_id="health_get")
@router.head(
    "/health", response_class=Response, responses=statuses(KEYED), operation_id="health_head"
)
async def health(caller: CallerDep, monitor: HealthDep) -> Response:
    """Returns 200 while this process runs. `status` is the deployment's state; the rest needs a
    key where keys are configured."""
    report = monitor.report() if caller.sees_details else Health(status=monitor.status)
    return json_response(report.model_dump(exclude_unset=True))


@router.get(
    "/ready",
    response_model=Readiness,
    operation_id="ready_get",
    responses={**errors(FREE), 503: {"model": Readiness, "description": _NOT_READY}},
)
@router.head(
    "/ready",
    response_class=Response,
    responses=statuses(FREE | {503}),
    operation_id="ready_head",
)
async def ready(
    monitor: HealthDep, generation: GenerationDep, open_requests: OpenRequestsDep
) -> Response:
    """Returns 200 when new requests are accepted, else 503: no model is known, Redis is unreachable
    or the frontend shuts down. Requests for `unserved` models wait until a worker comes."""
    known = generation.models.known
    is_ready = open_requests.closed is None and monitor.is_fresh and bool(known)
    readiness = Readiness(
        ready=is_ready,
        closed=open_requests.closed,
        status=monitor.status,
        models=list(known),
        unserved=[name for name, model in known.items() if not model.is_served],
    )
    response = json_response(readiness.model_dump(), 200 if is_ready else 503)
    if not is_ready:
        response.headers["retry-after"] = "1"
    return response


@router.get("/version", responses=errors(KEYED))
async def release() -> Version:
    """Returns the release of this frontend, in vLLM's shape."""
    return Version(version=_VERSION)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **errors(KEYED)},
)
async def metrics(counters: MetricsDep) -> Response:
    """Returns the metrics in the Prometheus text format (see the table in `api.metrics`)."""
    return Response(
        counters.exposition(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )
