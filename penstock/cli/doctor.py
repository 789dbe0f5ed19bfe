"""`penstock doctor`: looks for what will go wrong, before it does."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.options import Json
from penstock.cli.output import print_json, print_table
from penstock.rooms import reach_rooms

if TYPE_CHECKING:
    from penstock.doctor.finding import Finding


def doctor(json: Json = False) -> None:
    """Checks settings, Redis, ports, disk, memory, compiler, PyTorch, the model and tracing.

    It looks at what `penstock up` would start with the same flags and variables, and starts
    nothing. With the Redis of a running service it also counts recent jobs that computed a prefix
    again. A collector of traces gets a request without spans. Ends with 1 where something is
    wrong; warnings do not count.
    """
    reach_rooms()
    found = []
    for finding in _findings():
        found.append(finding)
        if json:
            print_json(asdict(finding))
    if not json:
        rows = [(finding.level.value, finding.check, finding.sentence) for finding in found]
        print_table(("", "check", "seen"), rows, "nothing was checked.")
    num_wrong = sum(finding.level.value == "error" for finding in found)
    if num_wrong:
        raise CommandError(f"{num_wrong} of {len(found)} checks found an error.", ExitCode.FAILED)


def _findings() -> Iterator[Finding]:
    from penstock.doctor.finding import fine, wrong

    yield fine("python", f"Python {sys.version.split()[0]} in {sys.prefix}")
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        yield wrong(
            "packages", f"{', '.join(missing)} is not installed: pip install 'penstock[worker]'"
        )
    launcher, worker, bad = _settings()
    yield from bad
    from penstock.doctor.machine import (
        check_compiler,
        check_disk,
        check_engine,
        check_memory,
        check_ports,
        check_private_server,
        check_upstreams,
    )
    from penstock.doctor.server import check_redis
    from shared.cuda_devices import device_type
    from shared.partitions import PartitionCount

    if launcher is not None:
        if launcher.redis_url:
            count = PartitionCount.parse(launcher.partitions).total
            yield from asyncio.run(check_redis(launcher.redis_url, launcher.namespace, count))
        else:
            yield from check_private_server(Path(launcher.data_dir))
        yield from check_ports(launcher.host, launcher.port, launcher.frontends)
        yield from check_disk("data", Path(launcher.data_dir), "PENSTOCK_DATA_DIR")
    if worker is not None:
        from penstock.doctor.model import check_model, weights_bytes
        from worker.cache import cache_directory

        yield from check_model(worker.model)
        on_cpu = device_type(worker.device) != "cuda"
        if worker.engine != "http":
            yield from check_memory(weights_bytes(worker.model), on_cpu=on_cpu)
        if worker.engine == "penstock" and on_cpu:
            yield from check_compiler()
            if cache_directory() is None:
                yield wrong("cache", "There is no directory for compiled kernels: XDG_CACHE_HOME.")
        if worker.engine == "http":
            yield from check_upstreams(worker.upstream_urls, worker.upstream_key_file)
        else:
            yield from check_engine(worker.engine, worker.device, worker.engine_python)
    from penstock.doctor.tracing import check_tracing

    yield from check_tracing()


def _settings() -> tuple[Any, Any, list[Finding]]:
    """Returns the launcher's and the worker's settings, None where they are bad, and findings."""
    from penstock.doctor.finding import fine, warning, wrong
    from penstock.launcher.settings import LauncherSettings, setting_names
    from shared.environment import misspelling_warnings, name_warnings
    from shared.settings import SettingsError, load_settings
    from worker.settings import WorkerSettings

    bad: list[Finding] = []

    def load(settings_class: Any, **given: object) -> Any:
        try:
            return load_settings(settings_class, **given)
        except SettingsError as error:
            bad.append(wrong("settings", str(error)))
            return None

    launcher = load(LauncherSettings)
    # For `up`: it gives its children the address of a private server.
    is_given = launcher is not None and launcher.redis_url
    given = {} if is_given else {"redis_url": "unix:///private"}
    worker = load(WorkerSettings, **given)
    if importlib.util.find_spec("fastapi") is not None:
        from api.settings import ApiSettings

        load(ApiSettings, **given)
    try:
        unknown = name_warnings(os.environ, setting_names())
    except ModuleNotFoundError:  # the extra of frontends: their names are unknown
        known = {*LauncherSettings.model_fields, *WorkerSettings.model_fields}
        unknown = misspelling_warnings(os.environ, known)
    bad += [warning("settings", sentence) for sentence in unknown]
    if not bad:
        bad.append(fine("settings", "All of them can be used."))
    return launcher, worker, bad
