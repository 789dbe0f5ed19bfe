"""The frontend's application: parts made, middleware stacked, routes joined."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import APIRouter, FastAPI

from api.auth.access import AccessMiddleware, has_operators_key
from api.auth.keys import KeyRing
from api.auth.stream_tokens import StreamTokens
from api.batches import routes as batches
from api.batches.row import MAX_BATCH_ROWS, BatchBounds, RunContext, make_endpoints
from api.batches.runner import BatchRunner
from api.dependencies import part_in
from api.deployment import routes as deployment
from api.dialects.chat import routes as chat
from api.dialects.completions import routes as completions
from api.dialects.embeddings import routes as embeddings
from api.dialects.generate import routes as generate
from api.dialects.messages import routes as messages
from api.dialects.responses import routes as responses
from api.dialects.responses.socket import ResponseSockets
from api.files import routes as files
from api.files.upload import FORM_BYTES
from api.http.middleware import (
    BodyLimitMiddleware,
    ControlCharactersMiddleware,
    ErrorResponsesMiddleware,
    TrailingSlashMiddleware,
    handle_framework_errors,
)
from api.http.open_requests import OpenRequests
from api.http.openapi import customize_openapi, openapi_router
from api.http.origins import AllowedHostsMiddleware, OriginMiddleware
from api.http.request_ids import KINDS_BY_PATH, RequestIdMiddleware
from api.http.shares import Pot
from api.http.traces import TracesMiddleware
from api.jobs import bulk, durable_routes
from api.jobs import routes as jobs
from api.jobs.service import JobService
from api.metrics import Metrics
from api.on_demand import preload
from api.services import Services, Transport, socket_pot
from api.settings import ApiSettings
from api.system import health, models, orders
from api.system import metrics as system_metrics
from api.system.pages import pages_router
from shared.huge_pages import collapse_heap
from shared.messages import Durability
from shared.outages import STORE, RateLimitedOutageLog
from shared.redis.check import UnsafeServer
from shared.tasks import cancel_and_wait
from shared.tracing import Tracing
from shared.transport.connect import RedisTransport, StorePolicy
from shared.transport.partitions.transport import PartitionedTransport, open_partitions
from shared.transport.ports.jobs import TransportError

log = logging.getLogger(__name__)

CHECK_AGAIN_S = 2.0
SETTLED_S = 2.0  # then a frontend mostly has what it keeps: modules, cards, tokenizers


def create_app(settings: ApiSettings, transport: Transport | None = None) -> FastAPI:
    """Returns the application. Most of its parts are made when it starts up: see `Services`.

    Without `transport` it opens one to `settings.redis_url` and closes it at the end; it starts
    while the server is away, too. Raises KeysInvalid for keys that cannot be used.
    """
    preload()
    metrics = Metrics(settings.metrics_names)
    share = settings.max_queue_share_per_tenant
    open_requests = OpenRequests(settings.max_open_requests, share)
    sockets = socket_pot(settings)
    ring = KeyRing(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            in_use = transport
            if in_use is None:
                in_use = await stack.enter_async_context(_own_transport(settings, open_requests))
            services = Services(settings, in_use, metrics, open_requests, sockets, ring)
            app.state.services = services  # for tests and the end of the process
            app.state.parts = services.parts()
            stack.push_async_callback(services.aclose)
            await services.start()
            runner = _batch_runner(services)
            stack.push_async_callback(runner.aclose)
            runner.start()
            settling = asyncio.create_task(_settle())
            stack.push_async_callback(cancel_and_wait, settling)
            yield

    app = FastAPI(
        title="Penstock",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.open_requests = open_requests
    rooms = (
        chat,
        completions,
        embeddings,
        responses,
        generate,
        messages,
        files,
        batches,
        models,
        orders,
        jobs,
        bulk,
        durable_routes,
        deployment,
        health,
        system_metrics,
    )
    routers = [*(room.router for room in rooms), openapi_router(), pages_router()]
    handle_framework_errors(app, routers)
    _add_middleware(app, settings, metrics, ring, sockets, routers)
    for router in routers:
        app.include_router(router)
    customize_openapi(app)
    return app


def _add_middleware(
    app: FastAPI,
    settings: ApiSettings,
    metrics: Metrics,
    ring: KeyRing,
    sockets: Pot,
    routers: Sequence[APIRouter],
) -> None:
    # The last one added stands outermost.
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=settings.max_body_bytes,
        larger={("POST", files.PATH): settings.max_file_bytes + FORM_BYTES},
    )
    app.add_middleware(
        AccessMiddleware,
        ring=ring,
        routers=routers,
        stream_tokens=lambda scope: part_in(scope, StreamTokens),
        metrics_key=settings.metrics_key,
        monitoring_without_keys=settings.monitoring_without_keys,
    )
    origins = settings.origins_for(has_keys=not ring.is_open)
    app.add_middleware(
        AllowedHostsMiddleware, allowed=settings.hosts_for(has_keys=not ring.is_open)
    )
    app.add_middleware(ControlCharactersMiddleware)
    app.add_middleware(ErrorResponsesMiddleware)
    app.add_middleware(OriginMiddleware, origins=origins)
    app.add_middleware(
        RequestIdMiddleware,
        metrics=metrics,
        partition_for=lambda scope: part_in(scope, JobService).admission.store.partition_for(),
    )
    app.add_middleware(
        TracesMiddleware,
        tracing=lambda scope: part_in(scope, Tracing),
        paths=KINDS_BY_PATH,
        is_trusted=partial(has_operators_key, ring),
    )
    app.add_middleware(TrailingSlashMiddleware)
    app.add_middleware(ResponseSockets, ring=ring, pot=sockets, max_bytes=settings.max_body_bytes)


def _batch_runner(services: Services) -> BatchRunner:
    settings = services.settings
    context = RunContext(
        jobs=services.jobs,
        pool=services.pool,
        batches=services.batches,
        index=services.files.index,
        storage=services.files.storage,
        endpoints=make_endpoints(services.generation, services.responses),
        bounds=BatchBounds(
            lease_ms=settings.frontend_lease_ms,
            max_rows=MAX_BATCH_ROWS,
            max_in_flight=settings.batch_rows_in_flight,
            max_line_bytes=settings.max_body_bytes,
        ),
        refuse_unused_parameters=settings.refuse_unused_parameters,
        tracing=services.tracing,
    )
    return BatchRunner(context, max_batches=settings.batches_at_once)


@asynccontextmanager
async def _own_transport(
    settings: ApiSettings, open_requests: OpenRequests
) -> AsyncIterator[RedisTransport | PartitionedTransport]:
    record_ms, text_ms = settings.retention_ms
    transport = await open_partitions(
        settings.redis_url,
        settings.partition_count,
        namespace=settings.namespace,
        policy=StorePolicy(record_ms=record_ms, text_ms=text_ms),
    )
    checking = asyncio.create_task(_check(settings, transport, open_requests))
    try:
        yield transport
    finally:
        await cancel_and_wait(checking)
        await transport.aclose()


async def _settle() -> None:
    await asyncio.sleep(SETTLED_S)
    await asyncio.to_thread(collapse_heap)


async def _check(
    settings: ApiSettings,
    transport: RedisTransport | PartitionedTransport,
    open_requests: OpenRequests,
) -> None:
    """Waits for the server, then judges it: one that would lose jobs gets none from here."""
    outage = RateLimitedOutageLog(
        log, failing="Redis is unavailable", recovered="Redis is available again", of=STORE
    )
    held = RateLimitedOutageLog(
        log,
        failing="Redis does not confirm writes as required; rejecting durable jobs",
        recovered="Redis confirms writes again; accepting durable jobs",
    )
    while True:
        try:
            sentences = await transport.check()
            why_not = await _check_durability(settings, transport)
            outage.succeeded()
            open_requests.hold(why_not)
            if why_not is not None:
                held.failed(url=transport.url, reason=why_not)
                await asyncio.sleep(CHECK_AGAIN_S)
                continue
            held.succeeded()
            for sentence in sentences:
                log.warning(sentence)
            return
        except UnsafeServer as error:
            log.critical(
                "the configuration of Redis is unsafe; rejecting all requests",
                extra={"detail": str(error)},
            )
            open_requests.close(f"The job store's configuration is unsafe: {error}")
            return
        except TransportError as error:
            outage.failed(url=transport.url, reason=str(error))
            await asyncio.sleep(CHECK_AGAIN_S)


async def _check_durability(settings: ApiSettings, transport: Transport) -> str | None:
    """Returns why nothing can be accepted as ACCEPT_DURABILITY requires until a later check.
    Raises UnsafeServer where the server can never do it, and TransportError."""
    durability = settings.accept_durability
    if durability is Durability.NONE:
        return None
    fault = await transport.durability.durability_fault(durability, settings.accept_replicas)
    if fault is None:
        return None
    why = f"PENSTOCK_ACCEPT_DURABILITY cannot be {durability}: {fault.sentence}"
    if fault.is_lasting:
        raise UnsafeServer(why)
    return f"At the moment {why}"
