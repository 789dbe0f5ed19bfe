"""The worker process: settings, logging, signals, and the one place that chooses a transport."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial

import uvloop

from shared.compat import IncompatibleLibrary
from shared.logs import Logs, start_logs
from shared.process import report_refusal
from shared.redis.check import UnsafeServer
from shared.redis.redis_compat import check_redis
from shared.redis.url import UnsupportedUrl
from shared.settings import EXIT_BAD_SETTINGS, SettingsError, load_settings, log_misspellings
from shared.transport.connect import open_transport
from worker.checkpoint import Checkpoint, CheckpointNotFound, find_checkpoint
from worker.loading import DownloadReport
from worker.metrics import metrics_listener
from worker.model_swaps import open_worker
from worker.service import new_worker_id
from worker.settings import WorkerSettings

EXIT_UNEXPECTED = 70

log = logging.getLogger(__name__)


def main() -> int:
    """Runs one worker. Returns the exit status: 0 after a stop, 2 for settings, a library, a model
    or a server that cannot be used, 70 after an unexpected error or when the engine kept dying."""
    try:
        check_redis()
        settings = load_settings(WorkerSettings)
        worker_id = new_worker_id()
        checkpoints = _find_checkpoints(settings, worker_id)
    except (IncompatibleLibrary, SettingsError, CheckpointNotFound) as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    logs = start_logs(settings.log_level, settings.log_format, process="worker")
    log_misspellings(WorkerSettings)
    try:
        return uvloop.run(_run(settings, checkpoints, worker_id, logs))
    except (UnsupportedUrl, UnsafeServer, SettingsError) as error:
        logs.stop()
        return _refuse(error)
    except Exception:
        log.critical("the worker ends after an unexpected error", exc_info=True)
        return EXIT_UNEXPECTED
    finally:
        logs.stop()


def _find_checkpoints(settings: WorkerSettings, worker_id: str) -> list[Checkpoint]:
    """Returns the files of all models, and reports their downloads to Redis."""
    connect = partial(open_transport, settings.redis_url, namespace=settings.namespace)
    found = []
    for name, model in settings.named_models.items():
        with DownloadReport(worker_id, name, connect) as report:
            found.append(
                find_checkpoint(model, name, report, with_weights=settings.engine != "http")
            )
    return found


async def _run(
    settings: WorkerSettings, checkpoints: Sequence[Checkpoint], worker_id: str, logs: Logs
) -> int:
    transport = await open_transport(
        settings.redis_url, namespace=settings.namespace, affinity_ms=settings.affinity_wait_ms
    )
    try:
        worker = open_worker(settings, checkpoints, transport, worker_id)
        logs.identity.is_worker(worker_id)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, worker.stop)
        log.info(
            "starting the worker",
            extra={
                "model": ", ".join(checkpoint.name for checkpoint in checkpoints),
                "checkpoint": ", ".join(str(checkpoint.path) for checkpoint in checkpoints),
                "redis": transport.url,
            },
        )
        with metrics_listener(
            lambda: worker.metrics.exposition.text(),
            lambda path: worker.probes.by_path(path),
            settings.metrics_host,
            settings.metrics_port,
        ):
            return await worker.run()
    finally:
        await transport.aclose()


def _refuse(error: Exception) -> int:
    if not report_refusal(str(error)):
        sys.stderr.write(f"penstock worker: {error}\n")
    return EXIT_BAD_SETTINGS
