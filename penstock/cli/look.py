"""`penstock status` and `penstock workers`: the state of the service."""

from __future__ import annotations

from typing import Any

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.options import DEFAULT_URL, Json, Key, Url
from penstock.cli.output import milliseconds, print_facts, print_json, print_table
from penstock.cli.service import client_of


def status(url: Url = DEFAULT_URL, key: Key = None, json: Json = False) -> None:
    """Shows whether the service accepts requests, its models, workers and queue.

    Ends with 3 where nothing answers, with 1 where new requests are not accepted.
    """
    client = client_of(url, key)
    ready = client.call("GET", "/ready", accepted=(503,))
    health = client.call("GET", "/health")
    if not isinstance(ready, dict) or "ready" not in ready or not isinstance(health, dict):
        raise CommandError(f"{client.url} is no frontend of Penstock.", ExitCode.NO_SERVICE)
    if json:
        print_json({"url": client.url, **ready, "health": health})
    else:
        _print_status(client.url, ready, health)
    if not ready["ready"]:
        raise CommandError(_why_not(ready))


def _print_status(url: str, ready: dict[str, Any], health: dict[str, Any]) -> None:
    redis = health.get("redis") or {}
    facts: list[tuple[str, object]] = [
        ("service", url),
        ("status", ready["status"]),
        ("ready", "yes" if ready["ready"] else "no"),
        ("running jobs", health.get("running")),
        ("waiting jobs", health.get("waiting")),
        ("queued prompt tokens", health.get("queued_tokens")),
        ("Redis", milliseconds(redis.get("latency_ms"))),
    ]
    facts += [("loading", loading_sentence(worker)) for worker in health.get("loading") or ()]
    print_facts(facts)
    loads = health.get("models") or {}
    rows = [
        (
            name,
            "no worker now" if name in ready.get("unserved", ()) else "served",
            loads.get(name, {}).get("workers"),
            loads.get(name, {}).get("waiting"),
        )
        for name in ready.get("models", ())
    ]
    print_table(("model", "state", "workers", "waiting"), rows, "no model is known yet.")


def _why_not(ready: dict[str, Any]) -> str:
    if ready.get("closed"):
        return f"this frontend takes no requests: {ready['closed']}"
    if not ready.get("models"):
        return "no worker has announced a model yet."
    return f"requests are not accepted now: the service is {ready.get('status')}."


def loading_sentence(worker: dict[str, Any]) -> str:
    """Returns how far a worker is that cannot serve yet, e.g. "m: loading weights, 43 %"."""
    return f"{worker['model']}: {_stage(worker)}"


def _stage(worker: dict[str, Any]) -> str:
    return f"{worker['stage']}, {worker['percent']} %" if worker["percent"] else worker["stage"]


def list_workers(url: str, key: str | None, *, json: bool) -> None:
    """Lists the live workers with what they serve and hold, and those that load their model."""
    health = client_of(url, key).call("GET", "/health")
    found = health.get("workers")
    if found is None:
        raise CommandError("workers are shown to callers with an operator's key.", ExitCode.REFUSED)
    loading = health.get("loading") or ()
    if json:
        for worker in found:
            print_json(worker)
        for worker in loading:
            print_json({"status": "loading", **worker})
        return
    rows = [
        (
            worker["id"],
            worker["status"],
            ", ".join(worker["models"]),
            worker["active"] + worker["prefilling"],
            worker["waiting"] + worker["pending"],
            worker["step"],
            milliseconds(worker["beat_age_ms"]),
        )
        for worker in found
    ]
    rows += [
        (
            worker["id"],
            _stage(worker),
            worker["model"],
            None,
            None,
            None,
            milliseconds(worker["report_age_ms"]),
        )
        for worker in loading
    ]
    columns = ("worker", "status", "models", "running", "waiting", "steps", "last heartbeat")
    print_table(columns, rows, "no worker is alive.")
