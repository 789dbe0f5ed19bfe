"""`penstock jobs`: list, show, follow, cancel, requeue; dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.operate import OfModel, Tenant, Yes, bulk_choice, run_bulk
from penstock.cli.options import DEFAULT_PATIENCE_S, DEFAULT_URL, Json, Key, Url
from penstock.cli.options import Patience as PatienceOption
from penstock.cli.output import (
    clock_time,
    milliseconds,
    note,
    note_recovery,
    print_facts,
    print_json,
    print_table,
    print_text,
    resumed_words,
    waiting_words,
)
from penstock.cli.service import client_of
from penstock.client import Client
from penstock.client.requests import in_path

JOB_ID = typer.Argument(help="The job's id, with or without its prefix.")
Id = Annotated[str, JOB_ID]


class State(StrEnum):
    """A job's state, as the service spells it; this package imports nothing of the service."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class LiveState(StrEnum):
    """The states of jobs that have not ended."""

    QUEUED = "queued"
    RUNNING = "running"


jobs = typer.Typer(
    name="jobs", help="Looks at jobs, follows, cancels and requeues them.", no_args_is_help=True
)


@jobs.command("list")
def list_jobs(
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    state: Annotated[State | None, typer.Option(help="Jobs in this state.")] = None,
    tenant: Tenant = None,
    model: OfModel = None,
    error: Annotated[str | None, typer.Option(help="Those with this error code.")] = None,
    id: Annotated[str | None, typer.Option(help="Those whose id begins or ends so.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    dead: Annotated[bool, typer.Option("--dead", help="Dead letters instead of jobs.")] = False,
) -> None:
    """Lists jobs, newest first; with `--dead` those that crashed their workers."""
    client = client_of(url, key)
    given = {"state": state, "tenant": tenant, "model": model, "error": error, "id": id}
    query = {name: value for name, value in given.items() if value is not None}
    if dead:
        if query:
            names = ", ".join(f"--{name}" for name in query)
            raise CommandError(
                f"--dead lists all dead letters, without {names}.", ExitCode.UNUSABLE
            )
        _list_dead(client, limit, as_json=json)
        return
    page = client.call("GET", "/v1/jobs", query={**query, "limit": limit})
    found = page["data"]
    if page["has_more"] and len(found) < limit:
        note(f"searched the newest {page['searched']} jobs only.")
    if json:
        for job in found:
            print_json(job)
        return
    rows = [
        (
            job["id"],
            "resuming" if job.get("recovery") else job["status"],
            (job.get("error") or {}).get("code"),
            job["model"],
            job["usage"]["prompt_tokens"],
            job["usage"]["completion_tokens"],
            job["attempt"],
            milliseconds(job["timings"]["ttft_ms"]),
            clock_time(job["created_at"]),
        )
        for job in found
    ]
    columns = ("id", "status", "error", "model", "prompt", "output", "attempt")
    print_table((*columns, "first token", "created"), rows, "no jobs.")


def _list_dead(client: Client, limit: int, *, as_json: bool) -> None:
    found = client.call("GET", "/v1/dead-letters", query={"limit": limit})["data"]
    if as_json:
        for letter in found:
            print_json(letter)
        return
    rows = [
        (letter["id"], letter["model"], letter["code"], letter["crashes"], clock_time(at))
        for letter in found
        for at in (letter["died_at"],)
    ]
    print_table(("id", "model", "code", "crashes", "died"), rows, "no dead letters.")


@jobs.command()
def show(job: Id, url: Url = DEFAULT_URL, key: Key = None, json: Json = False) -> None:
    """Shows a job: state, place in the queue, times, tokens, worker, error; and why its prompt was
    cached or computed again."""
    path = f"/v1/jobs/{in_path(named(job))}"
    found = client_of(url, key).call("GET", path, query={"prefix": "true"})
    _print_job(found, as_json=json)


@jobs.command()
def cancel(
    job: Annotated[str | None, JOB_ID] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    state: Annotated[LiveState | None, typer.Option(help="Those in this state.")] = None,
    tenant: Tenant = None,
    model: OfModel = None,
    all: Annotated[bool, typer.Option("--all", help="All that have not ended.")] = False,
    yes: Yes = False,
) -> None:
    """Cancels a job in any state, and shows it as it ended; or all live ones that match."""
    wanted = {"state": state, "tenant": tenant, "model": model}
    of = bulk_choice([] if job is None else [named(job)], wanted, every=all)
    client = client_of(url, key)
    if job is not None:
        _print_job(client.cancel(job), as_json=json)
        return
    run_bulk(client, "/v1/jobs/cancel", of, "cancel", as_json=json, confirmed=yes)


@jobs.command()
def requeue(job: Id, url: Url = DEFAULT_URL, key: Key = None, json: Json = False) -> None:
    """Runs a dead letter's job again, and shows the new job."""
    path = f"/v1/jobs/{in_path(named(job))}/requeue"
    _print_job(client_of(url, key).call("POST", path), as_json=json)


@jobs.command()
def follow(
    job: Id,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Streams a job's text from its start to its end, also over lost connections.

    Ends with 1 where the job did not finish.
    """
    client = client_of(url, key, patience_s=patience, on_recovery=note_recovery)
    for delta in client.follow(named(job), raw=True):
        _print_event(delta.event, as_json=json)


def _print_event(data: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(data)
    elif data.get("done"):
        print_text("\n")
        note(f"finished: {data.get('finish_reason')}")
    elif not data.get("index"):  # of several choices the first
        print_text(data.get("text", ""))


_PLACED = {
    "prefix": "its prefix in the worker's cache",
    "late": "any worker, as the one with its prefix did not take it in time",
    "any": "no preference",
}


def _print_job(job: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    usage, timings, error = job["usage"], job["timings"], job.get("error") or {}
    prefix = job.get("prefix") or {}
    facts: list[tuple[str, object]] = [
        ("id", job["id"]),
        ("status", job["status"]),
        ("model", job["model"]),
        ("kind", job["kind"]),
        ("tenant", job["tenant"]),
        ("place in the queue", job["queue_position"]),
        ("queue", "paused" if job.get("queue_paused") else None),
        ("worker", job["worker"]),
        ("placed by", _PLACED.get(job.get("placed") or "")),
        ("attempt", job["attempt"]),
        ("recovery", waiting_words(lost) if (lost := job.get("recovery")) else resumed_words(job)),
        ("created", clock_time(job["created_at"])),
        ("ended", clock_time(job["ended_at"])),
        ("text kept until", clock_time(job.get("text_retained_until"))),
        ("in the queue", milliseconds(timings["queue_ms"])),
        ("preemptions", job.get("preemptions") or None),
        ("first token", milliseconds(timings["ttft_ms"])),
        ("in all", milliseconds(timings["total_ms"])),
        ("prompt tokens", usage["prompt_tokens"]),
        ("cached tokens", usage["prompt_tokens_details"]["cached_tokens"]),
        ("prefix", prefix.get("sentence")),
        ("the text there", prefix.get("text")),
        ("the earlier text", prefix.get("earlier_text")),
        ("output tokens", usage["completion_tokens"]),
        ("finish reason", job["finish_reason"]),
        ("error", f"{error.get('code')}: {error.get('message')}" if error else None),
    ]
    print_facts(facts)


def named(job: str) -> str:
    """Returns the id. Raises CommandError for an empty one."""
    if not job.strip():
        raise CommandError("the id is empty.", ExitCode.UNUSABLE)
    return job
