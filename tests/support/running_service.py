"""A service in the test's process: the real app on a real socket, and a ScriptedWorker.

Both live on an event loop in a thread of their own, so that a test may use blocking clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from api.http.server import make_server
from api.main import create_app
from api.settings import ApiSettings
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, TextModel
from shared.text.text_model import load_text
from shared.transport.connect import RedisTransport
from shared.transport.partitions.transport import open_partitions
from tests.support.checkpoints import make_checkpoint
from tests.support.document_check import check_bodies
from tests.support.polling import wait_until as wait_until  # its tests import it from here
from tests.support.scripted_worker import Script, ScriptedWorker
from tests.support.service_processes import worker_process

MODEL = "penstock/tiny"
MAX_MODEL_LEN = 512
HEALTH_INTERVAL_S = 0.1

Result = TypeVar("Result")


class RunningService:
    """A frontend that listens, and a worker where there is a checkpoint for its card and text.

    `call` runs a coroutine on their loop.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        checkpoint: Path | None,
        **settings: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self.settings = ApiSettings(
            redis_url=redis_url,
            namespace=namespace,
            port=0,
            **{"health_interval_s": HEALTH_INTERVAL_S, **settings},
        )
        self.card: ModelCard
        self.loop = uvloop.new_event_loop()  # as in production
        self.worker: ScriptedWorker
        self.transport: RedisTransport
        self.text: TextModel
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(30), "the service did not start"
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        if self._thread.is_alive():
            waiting = [task.get_stack() for task in asyncio.all_tasks(self.loop)]
            raise AssertionError(f"the service did not stop: {waiting}")

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def until_ready(self) -> None:
        """Waits until a model can be used. Raises AssertionError after a minute."""
        url = f"{self.base_url}/ready"
        with httpx.Client(timeout=30) as client:
            wait_until(lambda: client.get(url).status_code == 200, "readiness")

    @property
    def script(self) -> Script:
        return self.worker.script

    def connect(self) -> socket.socket:
        """A connection for bytes that no client would send; they are not gathered."""
        host, port = self.base_url.removeprefix("http://").split(":")
        made = socket.create_connection((host, int(port)), 60)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def request(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """Sends a request. Its client leaves when this connection is closed."""
        made, content = self.connect(), json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return made

    def park(self) -> None:
        """Lets the worker take no more from the queue; returns once it does not."""
        self.script.pulls = False
        wait_until(lambda: self.worker.is_parked, "the worker to stop pulling")

    def job_ids(self) -> set[str]:
        listed = httpx.get(f"{self.base_url}/v1/jobs?limit=1000", timeout=30).json()["data"]
        return {job["job_id"] for job in listed}

    def hold_jobs_in(self, state: str) -> None:
        """Keeps those that come `queued`, in their `prefill` or in a slow `decode`."""
        self.script.step_s = 0.2  # so slowly that no answer ends before its test wants it to
        self.script.starts = state != "prefill"
        self.script.pulls = state != "queued"
        wait_until(lambda: self.worker.is_parked == (state == "queued"), "the worker's attention")

    def until_job_in(self, state: str, before: set[str]) -> str:
        """The id of a job that is none of `before`, once it is in that state."""
        found: list[str] = []

        def is_there() -> bool:
            for job_id in self.job_ids() - before:
                job = self.job(job_id)
                in_state = {
                    "queued": job["status"] == "queued",
                    "prefill": job_id in self.worker.jobs,
                    "decode": job["usage"]["completion_tokens"] > 2,
                }
                found.extend([job_id] if in_state[state] else [])
            return bool(found)

        wait_until(is_there, f"a job in state {state}")
        return found[0]

    def until_disconnected(self, job_id: str) -> None:
        """Returns once a job is cancelled as its client's, and no worker has it."""
        self.until_job_is(job_id, "cancelled")
        assert self.job(job_id)["error"]["code"] == "disconnected"
        self.script.pulls = self.script.starts = True
        wait_until(lambda: not self.worker.jobs, "the worker to drop it")

    def job(self, name: str) -> dict[str, Any]:
        """A job as the service shows it."""
        return dict(httpx.get(f"{self.base_url}/v1/jobs/{name}", timeout=30).json())

    def until_job_is(self, name: str, status: str) -> None:
        wait_until(lambda: self.job(name)["status"] == status, f"a job that is {status}")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._main())
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise
        finally:
            self.loop.close()

    async def _main(self) -> None:
        self.app = check_bodies(create_app(self.settings))
        self.server = make_server(self.app, self.settings)
        opened: Any = await open_partitions(
            self.settings.redis_url,
            self.settings.partition_count,
            namespace=self.settings.namespace,
        )
        self.transport = opened
        tasks = [asyncio.create_task(self.server.serve())]
        if self._checkpoint is not None:
            self.worker = self._make_worker(self._checkpoint)
            tasks.append(asyncio.create_task(self.worker.run()))
        try:
            while not self.server.started:
                await asyncio.sleep(0.01)
            port = self.server.servers[0].sockets[0].getsockname()[1]
            self.base_url = f"http://127.0.0.1:{port}"
            self._started.set()
            await self._stop.wait()
        finally:
            self.app.state.open_requests.cut_all()
            self.server.should_exit = True
            for running in tasks[1:]:
                await self.worker.stop(running)
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.transport.aclose()

    def _make_worker(self, checkpoint: Path) -> ScriptedWorker:
        self.card, blobs = card_from_checkpoint(
            checkpoint,
            name=MODEL,
            max_model_len=MAX_MODEL_LEN,
            kv_capacity_tokens=4096,
            dtype="float32",
            num_parameters=1,
        )
        self.text = load_text(self.card, blobs)
        return ScriptedWorker(self.transport, self.card, blobs)


def make_tiny_checkpoint(directory: Path) -> Path:
    """Files that the worker's card and text come from."""
    return make_checkpoint(directory / "tiny")


@contextlib.contextmanager
def running_frontend(redis_url: str, namespace: str, **settings: Any) -> Iterator[RunningService]:
    """Yields a frontend without a worker, and stops it afterwards."""
    frontend = RunningService(redis_url, namespace, None, **settings)
    frontend.start()
    try:
        yield frontend
    finally:
        frontend.stop()


@contextlib.contextmanager
def running_service(
    redis_url: str, namespace: str, checkpoint: Path, **settings: Any
) -> Iterator[RunningService]:
    """Yields a service that is ready, and stops it afterwards."""
    service = RunningService(redis_url, namespace, checkpoint, **settings)
    service.start()
    try:
        service.until_ready()
        yield service
    finally:
        service.stop()


@contextlib.contextmanager
def frontend_of_workers(
    redis_url: str,
    namespace: str,
    directory: Path,
    models: Mapping[str, Mapping[str, str]],
    **settings: Any,
) -> Iterator[RunningService]:
    """Yields a frontend and a worker process for each model, once all are served.

    `models`: the settings of each, by its served name; MODEL is its checkpoint. Their logs are in
    `directory`, <name>.log (`-` for `/`), and in the error of one that ends or is never served.
    """
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                worker_process(
                    redis_url,
                    namespace,
                    Path(more["MODEL"]),
                    directory / f"{name.replace('/', '-')}.log",
                    **{"SERVED_MODEL_NAME": name, **more},
                )
            )
            for name, more in models.items()
        }
        frontend = stack.enter_context(running_frontend(redis_url, namespace, **settings))

        def served() -> bool:
            assert all(worker.alive for worker in workers.values()), "a worker ended"
            listed = httpx.get(f"{frontend.base_url}/v1/models", timeout=30).json()["data"]
            return {model["id"] for model in listed} >= set(models)

        try:
            wait_until(served, "workers for all models", 120)
            frontend.until_ready()
        except AssertionError:
            raise AssertionError({name: made.log for name, made in workers.items()}) from None
        yield frontend
