"""The launcher: finds or starts a Redis, runs workers and frontends, stops all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine
from functools import partial
from threading import Event
from typing import Any

from shared.cores import available_cores, share_of_cores
from shared.launcher.processes import (
    Child,
    GaveUp,
    RedisSupervisor,
    RedisWatch,
    report_worker_death,
)
from shared.launcher.redis_server import (
    PrivateServer,
    ServerError,
    find_server_binary,
    inspect_command,
)
from shared.launcher.settings import LauncherSettings
from shared.process import STOP_SIGNALS, EarlySignals
from shared.redis.url import UnsupportedUrl
from shared.settings import EXIT_BAD_SETTINGS, SettingsError, load_settings
from shared.transport.connect import open_transport

KILL_AFTER_S = 5.0  # beyond stop_timeout_s: time for a clean exit after the last stream


def main(early_signals: EarlySignals) -> int:
    """Runs until a signal; returns the exit code: 0 after Ctrl-C or SIGTERM, 2 for bad settings, 1
    when a child cannot be kept running."""
    try:
        settings = load_settings(LauncherSettings)
    except SettingsError as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    try:
        return _launch(settings, early_signals)
    except KeyboardInterrupt:  # a second signal before anything was running
        return 128 + signal.SIGINT


def _launch(settings: LauncherSettings, early_signals: EarlySignals) -> int:
    if sentence := _ports_in_use(settings):
        say(sentence)
        return EXIT_BAD_SETTINGS
    if settings.redis_url:
        return asyncio.run(_run_with_given_redis(settings, early_signals))
    if find_server_binary() is None:
        early_signals.let_go()
        if early_signals.received:
            return 128 + early_signals.received[0]
        return _run_in_one_process(settings)
    server = PrivateServer(settings.data_dir / "redis")
    try:
        url = server.start()
    except ServerError as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    try:
        say(f"private {server.version} with an append-only file in {server.data_dir}")
        keeper = RedisSupervisor(server, say)
        return asyncio.run(Launcher(settings, url).run(early_signals, keeper.supervise()))
    finally:
        server.stop()


async def _run_with_given_redis(settings: LauncherSettings, early_signals: EarlySignals) -> int:
    try:
        transport = await open_transport(settings.redis_url)
    except UnsupportedUrl as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    watch = RedisWatch(transport, say)
    try:
        launcher = Launcher(settings, settings.redis_url, lambda: watch.trouble)
        return await launcher.run(early_signals, watch.run())
    finally:
        await transport.aclose()


def say(sentence: str) -> None:
    """Prints one line at the terminal."""
    print(f"penstock: {sentence}", file=sys.stderr, flush=True)


def _run_in_one_process(settings: LauncherSettings) -> int:
    say(
        "no valkey-server or redis-server >= 7.0 was found: everything runs in one process on an "
        "in-memory stand-in. Nothing survives a restart, no second worker or frontend can join, "
        "and redis-cli cannot connect to it. For trying out only."
    )
    if settings.workers > 1 or settings.frontends > 1:
        say("WORKERS and FRONTENDS need a real Redis: one of each is started")
        settings = settings.model_copy(update={"workers": 1, "frontends": 1})
    # Imported here: it imports api and worker, which the launcher otherwise never does.
    from shared.launcher.single_process import FAKE_URL, run_in_one_process

    os.environ |= {"REDIS_URL": FAKE_URL} | _child_defaults(settings)
    return run_in_one_process(settings, lambda over: announce_when_ready(settings, FAKE_URL, over))


def _child_defaults(settings: LauncherSettings) -> dict[str, str]:
    """Returns settings that suit a terminal; the environment overrides them."""
    defaults = {
        "DRAIN_TIMEOUT_S": f"{settings.stop_timeout_s:g}",
        "SHUTDOWN_TIMEOUT_S": f"{settings.stop_timeout_s:g}",
        "FILES_DIR": str((settings.data_dir / "files").resolve()),
        "LOG_FORMAT": "text",
    }
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _threads_of(index: int, workers: int) -> dict[str, str]:
    """Returns a worker's share of the cores, unless the environment sets threads. Frontends and
    Redis get none of their own: a thread that yields to them costs next to nothing."""
    given = {name.upper() for name, value in os.environ.items() if value}  # as settings are read
    if workers == 1 or given & {"NUM_THREADS", "OMP_NUM_THREADS"}:
        return {}
    return {"NUM_THREADS": str(share_of_cores(available_cores(), workers, index))}


def _ports_in_use(settings: LauncherSettings) -> str | None:
    """Returns a sentence about the first port that cannot be bound; None where all can be."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    for port in range(settings.port, settings.port + settings.frontends):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except (OSError, OverflowError) as error:
                return f"cannot listen on {settings.host} port {port}: {error}. Set HOST or PORT."
    return None


class Launcher:
    """Runs the children of one `make run` around a Redis that is already there."""

    def __init__(
        self,
        settings: LauncherSettings,
        redis_url: str,
        trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`trouble` returns a known reason why the children are not ready, or None."""
        self._settings = settings
        self._redis_url = redis_url
        self._trouble = trouble
        env = dict(os.environ) | {"REDIS_URL": redis_url} | _child_defaults(settings)
        self._workers = [
            Child(
                f"worker {index}",
                [sys.executable, "-m", "worker"],
                env | _threads_of(index, settings.workers),
                say,
                partial(report_worker_death, redis_url, settings.namespace),
            )
            for index in range(settings.workers)
        ]
        self._frontends = [
            Child(
                f"frontend {index}",
                [sys.executable, "-m", "api"],
                env | {"HOST": settings.host, "PORT": str(settings.port + index)},
                say,
            )
            for index in range(settings.frontends)
        ]

    async def run(self, early_signals: EarlySignals, beside: Coroutine[Any, Any, None]) -> int:
        """Runs until a signal, or until a child cannot be kept running; returns the exit code.
        `beside` runs as long as any child does."""
        stop_requests: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, stop_requests.put_nowait, signum)
        if early_signals.received:
            say("stopped before anything was started")
            beside.close()
            return 0
        children = self._workers + self._frontends
        supervisors = [asyncio.create_task(child.supervise()) for child in children]
        watching_redis = asyncio.create_task(beside)
        over = threading.Event()
        announcer = asyncio.create_task(
            asyncio.to_thread(announce_when_ready, self._settings, self._redis_url, over)
        )
        stopper = asyncio.create_task(stop_requests.get())
        try:
            return await self._until_the_end([*supervisors, watching_redis], announcer, stopper)
        finally:
            over.set()
            stopper.cancel()
            await self._stop(supervisors, stop_requests)
            watching_redis.cancel()
            await asyncio.wait((watching_redis,))

    async def _until_the_end(
        self,
        supervisors: list[asyncio.Task[None]],
        announcer: asyncio.Task[bool],
        stopper: asyncio.Task[int],
    ) -> int:
        watched: set[asyncio.Task[Any]] = {*supervisors, announcer, stopper}
        while True:
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if stopper in done:
                say("stopping; once more to stop at once")
                return 0
            for task in done:
                error = task.exception()
                if isinstance(error, GaveUp):
                    say(str(error))
                    return error.exit_code
                if error is not None:
                    raise error
            if announcer in done and not announcer.result():
                trouble = self._trouble()
                why = f": {trouble}" if trouble else ""
                say(f"not ready within {self._settings.ready_timeout_s:g} s{why}")
                return 1

    async def _stop(
        self, supervisors: list[asyncio.Task[None]], stop_requests: asyncio.Queue[int]
    ) -> None:
        """Ends frontends and workers together; running streams may finish meanwhile."""
        children = self._frontends + self._workers
        for child in children:
            child.stop()
        everyone = asyncio.ensure_future(asyncio.wait(supervisors))
        again = asyncio.ensure_future(stop_requests.get())
        patience_s = self._settings.stop_timeout_s + KILL_AFTER_S
        both: set[asyncio.Future[Any]] = {everyone, again}
        await asyncio.wait(both, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not everyone.done():
            for child in children:
                child.stop(signal.SIGKILL)
        await everyone


POLL_S = 0.1


def announce_when_ready(settings: LauncherSettings, redis_url: str, over: Event) -> bool:
    """Blocks until every frontend is ready and sees a worker, then prints.

    False: `ready_timeout_s` passed first, or `over` was set.
    """
    deadline_s = time.monotonic() + settings.ready_timeout_s
    urls = [base_url(settings, index) for index in range(settings.frontends)]
    for url in urls:
        while not _served_models(url):
            if time.monotonic() > deadline_s or over.wait(POLL_S):
                return False
    body = {
        "model": _served_models(urls[0])[0],
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
    }
    # Where keys are configured the line needs one; the launcher does not know it.
    needs_key = not _answers_ok(f"{urls[0]}/v1/models")
    key = ' -H "authorization: Bearer $KEY"' if needs_key else ""
    print(
        f"\nPenstock is ready: {' '.join(urls)}\n\n"
        f"  curl -N {urls[0]}/v1/chat/completions{key} -H 'content-type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n\n"
        f"Look inside: {inspect_command(redis_url)}\n"
        "Stop: Ctrl-C\n",
        flush=True,
    )
    return True


def base_url(settings: LauncherSettings, index: int) -> str:
    """Returns a frontend's URL for a client on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port + index}"


def _served_models(url: str) -> list[str]:
    """Returns the models that a live worker serves."""
    try:
        ready = _get_json(f"{url}/ready")
    except OSError:  # not listening yet, or not ready
        return []
    return [name for name in ready["models"] if name not in ready["unserved"]]


def _answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or an HTTP error: URLError is one
        return False


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)
