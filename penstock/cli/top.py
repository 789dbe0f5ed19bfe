"""`penstock top`: the service as it works, redrawn each second."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.options import DEFAULT_URL, Json, Key, Url
from penstock.cli.output import clock_time, fitted_table, milliseconds, print_json
from penstock.cli.service import client_of
from penstock.client import Client, Unreachable
from shared.printable import printable

MOST_JOBS = 20


def top(
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then the end.")] = False,
) -> None:
    """Shows queue, workers and running jobs, again each second. Ctrl-C ends it.

    With `--json` a line for each look.
    """
    client = client_of(url, key)
    before = _look(client)
    if json or once or not sys.stdout.isatty():
        while True:
            if json:
                print_json(before)
            else:
                typer.echo(_plain(before))
            if once:
                return
            time.sleep(interval)
            before = _look(client)
    with Live(screen=True, auto_refresh=False) as live:
        live.update(_view(before, None, live.console.width), refresh=True)
        while True:
            time.sleep(interval)
            try:
                seen, trouble = _look(client), ""
            except Unreachable as error:  # the last look stays
                seen, trouble = before, str(error)
            live.update(_view(seen, before, live.console.width, trouble), refresh=True)
            before = seen


def _look(client: Client) -> dict[str, Any]:
    health = client.call("GET", "/health")
    if health.get("workers") is None:
        raise CommandError("workers are shown to callers with an operator's key.", ExitCode.REFUSED)
    jobs = client.jobs(state="running", limit=MOST_JOBS)
    return {"at": time.time(), "url": client.url, "health": health, "running": jobs}


def _plain(seen: dict[str, Any]) -> str:
    health = seen["health"]
    return (
        f"{health['status']}: {health['running']} running, {health['waiting']} waiting, "
        f"{len(health['workers'])} workers"
    )


def _view(
    seen: dict[str, Any], before: dict[str, Any] | None, width: int, trouble: str = ""
) -> Group:
    health = seen["health"]
    redis = milliseconds((health.get("redis") or {}).get("latency_ms"))
    head = f"{seen['url']}  {_plain(seen)}  Redis {redis or 'unreachable'}\n"
    if trouble:
        head = f"{printable(trouble)}\nLast seen {clock_time(seen['at'])}: {head}"
    steps = {} if before is None else {w["id"]: w["step"] for w in before["health"]["workers"]}
    span_s = 1.0 if before is None else max(seen["at"] - before["at"], 0.001)
    workers = [
        (
            worker["id"],
            worker["status"],
            ", ".join(worker["models"]),
            worker["active"] + worker["prefilling"],
            worker["waiting"] + worker["pending"],
            round((worker["step"] - steps[worker["id"]]) / span_s)
            if worker["id"] in steps
            else None,
            milliseconds(worker["beat_age_ms"]),
        )
        for worker in health["workers"]
    ]
    jobs = [
        (
            job["id"],
            job["model"],
            job["usage"]["prompt_tokens"],
            job["usage"]["completion_tokens"],
            job["attempt"],
        )
        for job in seen["running"]
    ]
    columns = ("worker", "status", "models", "running", "waiting", "steps/s", "last heartbeat")
    return Group(
        Text(head),
        fitted_table(columns, workers, width)[0],
        Text(),
        fitted_table(("job", "model", "prompt", "output", "attempt"), jobs, width)[0],
    )
