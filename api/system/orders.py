"""An operator's orders: a worker drains and serves again, a model's queue is paused and resumed.

Redis keeps an order, so it outlives the frontend that took it. Each one is a WARNING in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from api.auth.operators import DeploymentOperatorDep, who
from api.dependencies import provided
from api.errors import MAX_ECHO_CHARS
from api.generation.response_schemas import ResponseModel
from api.http.json_response import json_response
from api.http.openapi import NAMED, errors
from api.http.pagination import NO_QUERY, Flag, QueryModel
from api.request_errors import ClientError
from api.system.health import HealthDep
from shared.transport.ports.registry import Order, Ordered, TooManyPaused, WorkerRegistry

log = logging.getLogger(__name__)

router = APIRouter(tags=["Operators"])

RegistryDep = Annotated[WorkerRegistry, provided(WorkerRegistry)]


class DrainQuery(QueryModel):
    """The query of POST /v1/workers/{id}/drain."""

    exit: Flag = Field(False, description="Ends the worker's process after its last job.")


class WorkerOrder(ResponseModel):
    """The order that a worker follows from now on."""

    object: Literal["worker.order"] = "worker.order"
    id: str
    order: Order


class ModelQueue(ResponseModel):
    """The queue of a model. `changed`: this request paused or resumed it. `ignored_by`: live
    workers of an earlier release, which take jobs from a paused queue all the same."""

    object: Literal["model.queue"] = "model.queue"
    model: str
    is_paused: bool
    changed: bool
    ignored_by: list[str]


@router.post(
    "/v1/workers/{worker_id}/drain", response_model=WorkerOrder, responses=errors(NAMED | {409})
)
async def drain_worker(
    worker_id: str,
    params: Annotated[DrainQuery, Query()],
    operator: DeploymentOperatorDep,
    registry: RegistryDep,
) -> Response:
    """Orders a worker to end the jobs that it runs, and to take no other one. It stays until it is
    resumed, or exits with `exit`. Another frontend, or this one after a restart, may resume it."""
    order = Order.EXIT if params.exit else Order.DRAIN
    await _order(registry, worker_id, order)
    log.warning("an operator drains a worker", extra=_audit(who(operator), worker_id, order))
    return json_response(WorkerOrder(id=worker_id, order=order))


@router.post(
    "/v1/workers/{worker_id}/resume",
    response_model=WorkerOrder,
    responses=errors(NAMED | {409}),
    dependencies=[NO_QUERY],
)
async def resume_worker(
    worker_id: str, operator: DeploymentOperatorDep, registry: RegistryDep
) -> Response:
    """Orders a worker to take jobs again."""
    await _order(registry, worker_id, Order.SERVE)
    log.warning("an operator resumes a worker", extra=_audit(who(operator), worker_id, Order.SERVE))
    return json_response(WorkerOrder(id=worker_id, order=Order.SERVE))


@router.post(
    "/v1/models/{model_id:path}/pause",
    response_model=ModelQueue,
    responses=errors(NAMED | {409}),
    dependencies=[NO_QUERY],
)
async def pause_model(
    model_id: str, operator: DeploymentOperatorDep, registry: RegistryDep, health: HealthDep
) -> Response:
    """Pauses a model's queue: jobs are accepted and wait, their timeouts pass, and no worker takes
    one. Running jobs continue. The pause holds until it is resumed."""
    try:
        changed = await registry.pause(model_id, operator.key_id)
    except TooManyPaused as error:
        raise ClientError(
            "A thousand queues are paused, and no more may be. Resume one first.",
            status=409,
            code="too_many_paused_queues",
            param="id",
            should_retry=False,
        ) from error
    if changed is None:
        raise _not_found(
            model_id, "No worker has announced the model in the last day.", code="model_not_found"
        )
    ignored_by = [w.worker_id for w in health.workers if model_id in w.models and w.order is None]
    log.warning(
        "an operator pauses the queue of a model",
        extra={**who(operator), "model": model_id, "changed": changed},
    )
    return json_response(
        ModelQueue(model=model_id, is_paused=True, changed=changed, ignored_by=ignored_by)
    )


@router.post(
    "/v1/models/{model_id:path}/resume",
    response_model=ModelQueue,
    responses=errors(NAMED),
    dependencies=[NO_QUERY],
)
async def resume_model(
    model_id: str, operator: DeploymentOperatorDep, registry: RegistryDep
) -> Response:
    """Resumes a model's queue."""
    changed = await registry.resume(model_id)
    log.warning(
        "an operator resumes the queue of a model",
        extra={**who(operator), "model": model_id, "changed": changed},
    )
    return json_response(
        ModelQueue(model=model_id, is_paused=False, changed=changed, ignored_by=[])
    )


async def _order(registry: WorkerRegistry, worker_id: str, order: Order) -> None:
    """Raises ClientError for a worker that is not there, or cannot be ordered."""
    match await registry.order(worker_id, order):
        case Ordered.GONE:
            raise _not_found(worker_id, "No such worker is alive.", code="worker_not_found")
        case Ordered.OLD:
            raise ClientError(
                f"The worker '{worker_id[:MAX_ECHO_CHARS]}' is of an earlier release, which reads "
                "no orders. Stop its process with SIGTERM: it drains then.",
                status=409,
                code="worker_reads_no_orders",
                param="id",
                should_retry=False,
            )


def _audit(operator: Mapping[str, str], worker_id: str, order: Order) -> dict[str, str]:
    return {**operator, "worker_id": worker_id, "order": order.value}


def _not_found(name: str, why: str, *, code: str) -> ClientError:
    return ClientError(
        f"The {code.partition('_')[0]} '{name[:MAX_ECHO_CHARS]}' does not exist. {why}",
        status=404,
        code=code,
        param="id",
    )
