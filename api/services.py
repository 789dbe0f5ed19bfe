"""Services: the parts of one running frontend, made once from its settings."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from functools import partial
from importlib.metadata import version
from typing import Protocol

from api.auth.keys import KeyRing
from api.auth.stream_tokens import StreamTokens
from api.batches.routes import MAX_OPEN_BATCHES, MAX_RECORDS_PER_TENANT, BatchService
from api.deployment.feed import DeploymentFeed
from api.deployment.reader import DeploymentReader
from api.dialects.responses.store import ResponseStore
from api.files.service import FilePolicy, FileService
from api.files.storage import FileStorage
from api.files.upload import UploadLimits
from api.generation.models import GenerationService, JobDefaults, ModelCatalog
from api.generation.thread_pool import TextPool
from api.housekeeping import Housekeeping
from api.http.open_requests import OpenRequests
from api.http.shares import Pot
from api.http.sse import json_bytes
from api.http.time_slices import TimeSlices
from api.jobs.accepted_jobs import AcceptedJobs
from api.jobs.admission import Admission, DurableAccept
from api.jobs.disconnects import DisconnectTracker
from api.jobs.relay import EventRelay
from api.jobs.request_reader import RequestReader
from api.jobs.service import JobService
from api.metrics import Metrics
from api.settings import ApiSettings
from api.system.health import HealthMonitor
from api.system.metrics import DeploymentCollector, FrontendCollector, pot_report
from shared.logs import host_name
from shared.text.chat_template import RenderingProcesses
from shared.text.served_text import load_served_text
from shared.tracing import Tracing
from shared.tracing_export import open_tracing
from shared.transport.ports.admission import AdmissionLimits, DurabilityChecks, SubmittingStore
from shared.transport.ports.batches import BatchLimits, BatchStore
from shared.transport.ports.dead_letters import DeadLetters
from shared.transport.ports.deployment import Deployment, ProcessKind, Sample
from shared.transport.ports.files import FileIndex, FileLimits
from shared.transport.ports.job_search import JobSearch
from shared.transport.ports.jobs import EventBus
from shared.transport.ports.prompts import KeptPrompts
from shared.transport.ports.registry import WorkerRegistry

_VERSION = version("penstock")  # read from a file


class Transport(Protocol):
    """What a frontend uses of a transport."""

    @property
    def store(self) -> SubmittingStore: ...
    @property
    def registry(self) -> WorkerRegistry: ...
    @property
    def durability(self) -> DurabilityChecks: ...
    @property
    def bus(self) -> EventBus: ...
    @property
    def files(self) -> FileIndex: ...
    @property
    def batches(self) -> BatchStore: ...
    @property
    def dead_letters(self) -> DeadLetters: ...
    @property
    def prompts(self) -> KeptPrompts: ...
    @property
    def search(self) -> JobSearch: ...
    @property
    def deployment(self) -> Deployment: ...


class Services:
    """Makes the parts of one frontend; `start` begins its background work, `aclose` ends it.

    Parts get what they use by their constructors. Routes get parts by type: see `parts`.
    """

    def __init__(
        self,
        settings: ApiSettings,
        transport: Transport,
        metrics: Metrics,
        open_requests: OpenRequests,
        sockets: Pot,
        ring: KeyRing,
    ) -> None:
        store = transport.store
        # Contains a UUID and is never reused: an old frontend's readers are not a new one's.
        self.frontend_id = f"fe-{uuid.uuid4().hex}"
        self.tracing = open_tracing("penstock-frontend", self.frontend_id)
        self._started_at = round(time.time())
        self.settings = settings
        self.store = store
        self.dead_letters = transport.dead_letters
        self.prompts = transport.prompts
        self.batches = transport.batches
        self.metrics = metrics
        self.open_requests = open_requests
        self.slices = TimeSlices()
        share = settings.max_queue_share_per_tenant
        self.pool = TextPool(
            settings.text_threads, settings.max_waiting_text_bytes, share, metrics.accounts.charge
        )
        self.rendering = RenderingProcesses()
        self.catalog = ModelCatalog(
            transport.registry,
            self.pool,
            partial(
                load_served_text,
                processes=self.rendering,
                special_tokens_in_messages=settings.special_tokens_in_messages,
            ),
            settings.model_retention_s,
            settings.kept_models,
        )
        self.generation = GenerationService(
            self.catalog, self.pool, settings.max_answer_bytes, job_defaults(settings)
        )
        self.health = HealthMonitor(
            store, transport.registry, transport.deployment, settings.partition_count.total
        )
        self.stream_tokens = StreamTokens(store)
        self.files = FileService(
            transport.files,
            FileStorage(settings.files_dir, settings.namespace),
            file_policy(settings),
            open_requests,
            share,
        )
        self.disconnects = DisconnectTracker(store)
        self.relay = EventRelay(store, transport.bus, outage_s=settings.outage_s)
        self.durable = durable_accept(settings, transport)
        limits = admission_limits(settings)
        accepted = AcceptedJobs(store)
        self.admission = Admission(
            store,
            lambda tenant: ring.limits_of(tenant, limits),
            self.disconnects.cancel,
            accepted.add,
            self.durable,
        )
        self.jobs = self._new_jobs()
        retain_ms = round(settings.response_ttl_s * 1000)
        bodies = body_pot(settings)
        self.responses = ResponseStore(store, self.catalog, self.slices, retain_ms, bodies)
        self.batch_service = BatchService(
            self.batches,
            self.files.storage,
            self.durable,
            batch_limits(settings),
            settings.file_life_s,
        )
        self.reader = RequestReader(
            store,
            self.pool,
            settings.body_timeout_s,
            refuse_unused=settings.refuse_unused_parameters,
            max_bytes=settings.max_body_bytes,
            bodies=bodies,
            refusal_of=self.admission.refusal_of,
        )
        self.feed = DeploymentFeed(
            DeploymentReader(
                store,
                transport.search,
                self.dead_letters,
                self.batches,
                transport.deployment,
                self.health,
                self.catalog,
                ring,
                lambda tenant: ring.limits_of(tenant, limits),
            ),
            self.slices,
            open_requests,
            settings.keepalive_s,
            share,
        )
        self.pots = (
            open_requests.pot,
            sockets,
            self.feed.watchers,
            self.feed.views,
            self.files.uploads,
            self.reader.bodies,
            self.jobs.answers,
            self.pool.small,
            self.pool.large,
        )
        self._deployment = transport.deployment
        self._registry = transport.registry
        self._search = transport.search
        self._bus = transport.bus
        self._housekeeping = self._new_housekeeping(accepted, ring)
        self._collector = self._new_collector()
        self._deployment_collector = DeploymentCollector(self.health)

    def _new_jobs(self) -> JobService:
        return JobService(
            frontend_id=self.frontend_id,
            store=self.store,
            admission=self.admission,
            relay=self.relay,
            disconnects=self.disconnects,
            open_requests=self.open_requests,
            slices=self.slices,
            metrics=self.metrics,
            keepalive_s=self.settings.keepalive_s,
            answers=answer_pot(self.settings),
        )

    def _new_housekeeping(self, accepted: AcceptedJobs, ring: KeyRing) -> Housekeeping:
        return Housekeeping(
            self.store,
            self.disconnects,
            accepted,
            self.health,
            self.catalog,
            self.files,
            ring,
            self._report,
            frontend_id=self.frontend_id,
            lease_ms=self.settings.frontend_lease_ms,
            health_interval_s=self.settings.health_interval_s,
        )

    async def _report(self) -> None:
        """Tells the deployment that this frontend is there and what its tenants have used, and
        learns what they used elsewhere. Raises TransportError."""
        settings = self.settings
        stats: dict[str, str | int] = {
            "host": host_name(),
            "port": settings.port,
            "pid": os.getpid(),
            "version": _VERSION,
            "started_at": self._started_at,
            "streams": len(self.open_requests),
            "dashboards": self.feed.num_watchers,
            "pots": json_bytes([pot_report(pot) for pot in self.pots]).decode(),
        }
        accounts, failures = self.metrics.accounts, self.metrics.server_errors
        spent, counts = accounts.drain(), failures.copy()
        sample = Sample(counts, self.health.figures())
        failures.clear()
        try:
            await self._deployment.report(
                ProcessKind.FRONTEND, self.frontend_id, stats, spent, sample
            )
        except BaseException:
            accounts.give_back(spent)
            failures.update(counts)
            raise
        accounts.reported(spent)
        if self.health.queue is not None:
            self.pool.charge(accounts.elsewhere(self.health.queue.cpu_us_by_tenant))

    def _new_collector(self) -> FrontendCollector:
        return FrontendCollector(
            self.health,
            self.catalog,
            self.open_requests,
            self.disconnects,
            self.relay.counts,
            lambda: self.metrics.cancels_by_request,
            self.pots,
        )

    async def start(self) -> None:
        """Returns at once, also while Redis is unreachable."""
        self.metrics.registry.register(self._collector)
        self.metrics.deployment_registry.register(self._deployment_collector)
        await self._bus.start()
        await self.files.start()
        self._housekeeping.start()

    async def aclose(self) -> None:
        await self.feed.aclose()
        await self._housekeeping.aclose()
        await self.relay.aclose()
        await self.catalog.aclose()
        self.rendering.close()
        self.metrics.registry.unregister(self._collector)
        self.metrics.deployment_registry.unregister(self._deployment_collector)
        self.pool.close()
        self.files.close()
        await asyncio.to_thread(self.tracing.close)

    def parts(self) -> dict[type, object]:
        """Returns what routes may depend on, by type (see `api.dependencies`)."""
        return {
            BatchService: self.batch_service,
            DeadLetters: self.dead_letters,
            DeploymentFeed: self.feed,
            FileService: self.files,
            GenerationService: self.generation,
            HealthMonitor: self.health,
            JobSearch: self._search,
            JobService: self.jobs,
            KeptPrompts: self.prompts,
            Metrics: self.metrics,
            OpenRequests: self.open_requests,
            RequestReader: self.reader,
            ResponseStore: self.responses,
            StreamTokens: self.stream_tokens,
            TimeSlices: self.slices,
            Tracing: self.tracing,
            WorkerRegistry: self._registry,
        }


def durable_accept(settings: ApiSettings, transport: Transport) -> DurableAccept:
    """Returns what makes accepted jobs as durable as they must be."""
    return DurableAccept(
        transport.durability,
        settings.accept_durability,
        settings.accept_replicas,
        settings.accept_timeout_s,
    )


def job_defaults(settings: ApiSettings) -> JobDefaults:
    """Returns the defaults of a job's parameters."""
    max_retention_ms = round(settings.max_retention_s * 1000)
    return JobDefaults(
        settings.request_timeout_s,
        settings.queue_timeout_s,
        settings.accept_durability,
        settings.retention_ms[0],
        max_retention_ms,
    )


def batch_limits(settings: ApiSettings) -> BatchLimits:
    """Returns the bounds of the deployment's batches."""
    return BatchLimits(
        max_open=MAX_OPEN_BATCHES,
        max_tenant_open=settings.max_open_batches_per_tenant,
        max_tenant_records=MAX_RECORDS_PER_TENANT,
        keep_ms=settings.file_life_s * 1000,
        max_share_per_tenant=_store_share(settings),
    )


def admission_limits(settings: ApiSettings) -> AdmissionLimits:
    """Returns the limits of a tenant whose key sets none."""
    return AdmissionLimits(
        max_queued_jobs=settings.max_queued_jobs,
        max_queued_tokens=settings.max_queued_tokens,
        max_queue_share_per_tenant=settings.max_queue_share_per_tenant,
        max_store_share_per_tenant=_store_share(settings),
        max_queued_jobs_per_tenant=settings.max_queued_jobs_per_tenant,
        max_queued_tokens_per_tenant=settings.max_queued_tokens_per_tenant,
        max_jobs_per_tenant=settings.max_jobs_per_tenant,
        requests_per_minute=settings.requests_per_minute,
        tokens_per_minute=settings.tokens_per_minute,
    )


def _store_share(settings: ApiSettings) -> float | None:
    """Returns the share of a tenant of the store; None without keys, since there are no tenants."""
    has_keys = settings.api_keys or settings.api_keys_file
    return settings.max_queue_share_per_tenant if has_keys else None


def socket_pot(settings: ApiSettings) -> Pot:
    """Returns what bounds the open WebSockets."""
    return Pot(
        "websockets",
        settings.max_open_requests,
        settings.max_queue_share_per_tenant,
        what="open WebSockets",
        full="Too many open WebSockets. Try again later.",
    )


def body_pot(settings: ApiSettings) -> Pot:
    """Returns what bounds the bytes of request bodies on their way."""
    return Pot(
        "body_bytes",
        # One may always come, compressed and decoded.
        max(settings.max_open_body_bytes, 2 * settings.max_body_bytes),
        settings.max_queue_share_per_tenant,
        what="request bytes being received",
        full="Too many request bodies are being received. Try again later.",
    )


def answer_pot(settings: ApiSettings) -> Pot:
    """Returns what bounds the bytes of whole answers that are not sent yet."""
    return Pot(
        "answer_bytes",
        # One may always come.
        max(settings.max_open_answer_bytes, settings.max_answer_bytes),
        settings.max_queue_share_per_tenant,
        what="buffered response bytes",
        full="Too many buffered responses. Try again later, or request a stream.",
    )


def file_policy(settings: ApiSettings) -> FilePolicy:
    """Returns the bounds of the deployment's files."""
    limits = FileLimits(
        max_files=settings.max_files,
        max_bytes=settings.max_files_bytes,
        max_tenant_files=settings.max_files_per_tenant,
        max_tenant_bytes=settings.max_files_bytes_per_tenant,
        max_share_per_tenant=_store_share(settings),
    )
    upload = UploadLimits(
        settings.max_file_bytes, settings.body_timeout_s, settings.refuse_unused_parameters
    )
    return FilePolicy(limits, upload, settings.file_life_s)
