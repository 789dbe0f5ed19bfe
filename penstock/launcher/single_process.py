"""Both sides in one process, around an in-memory stand-in for Redis: for trying out only.

The one place where the two sides meet; only the launcher imports it, when there is no server.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence

from api.http.server import DrainingServer, make_server
from api.main import create_app
from api.settings import ApiSettings
from penstock.launcher.settings import LauncherSettings
from shared.logs import start_logs
from shared.settings import EXIT_BAD_SETTINGS, SettingsError, load_settings
from shared.transport.connect import open_transport
from worker.checkpoint import Checkpoint, CheckpointNotFound, find_checkpoint
from worker.metrics import metrics_listener
from worker.model_swaps import SwappingWorker, open_worker
from worker.service import WorkerService, new_worker_id
from worker.settings import WorkerSettings

FAKE_URL = "fake://"


def run_in_one_process(
    settings: LauncherSettings, announce: Callable[[threading.Event], bool]
) -> int:
    """Serves until Ctrl-C or SIGTERM; `announce` prints when it is ready."""
    try:
        api_settings = load_settings(ApiSettings)
        worker_settings = load_settings(WorkerSettings)
        checkpoints = [
            find_checkpoint(model, name) for name, model in worker_settings.named_models.items()
        ]
    except (SettingsError, CheckpointNotFound) as error:
        sys.stderr.write(f"penstock: {error}\n")
        return EXIT_BAD_SETTINGS
    logs = start_logs(worker_settings.log_level, worker_settings.log_format, process="penstock")
    try:
        return asyncio.run(_serve(api_settings, worker_settings, checkpoints, announce))
    except SettingsError as error:  # API keys or a port that cannot be used
        sys.stderr.write(f"penstock: {error}\n")
        return EXIT_BAD_SETTINGS
    finally:
        logs.stop()


async def _serve(
    api_settings: ApiSettings,
    worker_settings: WorkerSettings,
    checkpoints: Sequence[Checkpoint],
    announce: Callable[[threading.Event], bool],
) -> int:
    """Runs both sides. The frontend takes the signals; the worker continues until the last stream
    has ended."""
    transport = await open_transport(FAKE_URL, namespace=worker_settings.namespace)
    server = make_server(create_app(api_settings, transport), api_settings)
    worker = open_worker(worker_settings, checkpoints, transport, new_worker_id())
    try:
        with metrics_listener(
            lambda: worker.metrics.exposition.text(),
            lambda path: worker.probes.by_path(path),
            worker_settings.metrics_host,
            worker_settings.metrics_port,
        ):
            return await _run_both(server, worker, announce)
    finally:
        await transport.aclose()


async def _run_both(
    server: DrainingServer,
    worker: WorkerService | SwappingWorker,
    announce: Callable[[threading.Event], bool],
) -> int:
    working = asyncio.create_task(worker.run())
    serving = asyncio.create_task(server.serve())
    over = threading.Event()
    announcing = asyncio.create_task(asyncio.to_thread(announce, over))
    try:
        await asyncio.wait({working, serving}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        worker.stop()
        await serving
        return await working
    finally:
        over.set()
        await announcing
