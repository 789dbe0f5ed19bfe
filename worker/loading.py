"""Reports the loading progress of a worker that cannot serve yet to Redis, for people.

Nothing depends on it: if Redis is unavailable, the worker continues and logs that elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol

from shared.redis.url import UnsupportedUrl
from shared.transport.ports.deployment import Deployment, ProcessKind
from shared.transport.ports.jobs import TransportError

DOWNLOADING = "downloading"
INTERVAL_S = 1.0  # between reports
CLOSE_S = 2.0  # for the last report's connection

log = logging.getLogger(__name__)


async def report_loading(
    deployment: Deployment, worker_id: str, model: str, read: Callable[[], tuple[str, float]]
) -> None:
    """Reports, until cancelled, what `read` returns: a stage, and the share of it that is done."""
    while True:
        stage, share = read()
        stats: dict[str, str | int] = {"model": model, "stage": stage, "percent": int(100 * share)}
        try:
            await deployment.report(ProcessKind.LOADING, worker_id, stats)
        except TransportError as error:  # the service logs the outage
            log.debug("failed to report loading progress", extra={"error": str(error)})
        await asyncio.sleep(INTERVAL_S)


class LoadingTransport(Protocol):
    """The part of a transport that a download report uses."""

    @property
    def deployment(self) -> Deployment: ...
    async def aclose(self) -> None: ...


class DownloadReport:
    """Reports a download from its own thread, as the download blocks the main one.

    `with DownloadReport(...) as report:` and call `report(share)`, in any thread. What downloads
    nothing starts no thread. The thread keeps nothing alive: a process can end beside it.
    """

    def __init__(
        self, worker_id: str, model: str, open_transport: Callable[[], Awaitable[LoadingTransport]]
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._open_transport = open_transport
        self._share = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def __call__(self, share: float) -> None:
        self._share = share
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._tell()), name="download-report", daemon=True
                )
                self._thread.start()

    def __enter__(self) -> DownloadReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._over.set()
        if self._thread is not None and kind is None:
            self._thread.join(CLOSE_S)

    async def _tell(self) -> None:
        try:
            transport = await self._open_transport()
        except UnsupportedUrl as error:  # which the worker ends with, once it has its model
            log.debug("failed to report the download", extra={"error": str(error)})
            return
        reporting = asyncio.create_task(
            report_loading(
                transport.deployment,
                self._worker_id,
                self._model,
                lambda: (DOWNLOADING, self._share),
            )
        )
        try:
            while not self._over.is_set():
                await asyncio.sleep(0.1)
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await transport.aclose()
