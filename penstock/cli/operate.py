"""`penstock workers drain`, `penstock models`, and what cancels or requeues many jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.look import list_workers
from penstock.cli.options import DEFAULT_URL, Json, Key, Url
from penstock.cli.output import clock_time, note, print_json, print_table
from penstock.cli.service import client_of
from penstock.client import Client
from penstock.client.requests import in_path

SLICE = 100  # jobs of one request

WorkerId = Annotated[str, typer.Argument(help="The worker's id, as `penstock workers` shows it.")]
ModelId = Annotated[str, typer.Argument(help="The model's name.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")]
Tenant = Annotated[str | None, typer.Option(help="Those of this tenant.")]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Those for this model.")]

workers = typer.Typer(
    name="workers", help="Lists workers, drains and resumes them.", invoke_without_command=True
)
models = typer.Typer(
    name="models", help="Lists models, pauses and resumes their queues.", no_args_is_help=True
)
dead_letters = typer.Typer(
    name="dead-letters", help="Runs jobs that crashed their workers again.", no_args_is_help=True
)


@workers.callback()
def workers_or_one(
    context: typer.Context, url: Url = DEFAULT_URL, key: Key = None, json: Json = False
) -> None:
    """Lists the live workers with what they serve and hold, and those that load their model."""
    if context.invoked_subcommand is None:
        list_workers(url, key, json=json)
        return
    for name in ("url", "key", "json"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise CommandError(
                f"give --{name} after `{context.invoked_subcommand}`.", ExitCode.UNUSABLE
            )


@workers.command()
def drain(
    worker: WorkerId,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    exit: Annotated[
        bool,
        typer.Option(
            "--exit",
            help="End the worker's process after its last job. A unit or container that restarts "
            "it starts it again at once: stop that one instead.",
        ),
    ] = False,
) -> None:
    """Orders a worker to end its jobs and to take no other one, until it is resumed."""
    query = {"exit": "true"} if exit else {}
    _order(url, key, worker, "drain", query, as_json=json)
    if not json:
        after = (
            "exits after its last job" if exit else f"`penstock workers resume {worker}` ends it"
        )
        note(f"{worker} takes no new jobs; {after}.")


@workers.command("resume")
def resume_worker(
    worker: WorkerId, url: Url = DEFAULT_URL, key: Key = None, json: Json = False
) -> None:
    """Orders a drained worker to take jobs again."""
    _order(url, key, worker, "resume", {}, as_json=json)
    if not json:
        note(f"{worker} takes jobs again.")


def _order(
    url: str, key: str | None, worker: str, order: str, query: Mapping[str, str], *, as_json: bool
) -> None:
    path = f"/v1/workers/{in_path(worker)}/{order}"
    found = client_of(url, key).call("POST", path, query=query)
    if as_json:
        print_json(found)


@models.command("list")
def list_models(url: Url = DEFAULT_URL, key: Key = None, json: Json = False) -> None:
    """Lists the models that requests can name, with their workers and queues."""
    client = client_of(url, key)
    found = client.call("GET", "/v1/models")["data"]
    if json:
        for model in found:
            print_json(model)
        return
    loads = client.call("GET", "/health").get("models") or {}
    rows = []
    for model in found:
        load = loads.get(model["id"], {})
        state = (
            "paused"
            if model["is_paused"]
            else model.get("status", "served" if model["is_served"] else "unserved").replace(
                "_", " "
            )
        )
        since = clock_time(load.get("paused_since"))
        counts = (load.get("workers"), load.get("waiting"))
        rows.append((model["id"], state, *counts, model["max_model_len"], since))
    columns = ("model", "state", "workers", "waiting", "context", "paused since")
    print_table(columns, rows, "no model is known yet.")


@models.command()
def pause(name: ModelId, url: Url = DEFAULT_URL, key: Key = None, json: Json = False) -> None:
    """Pauses a model's queue: jobs are accepted and wait, running ones continue."""
    found = _queue(url, key, name, "pause", as_json=json)
    if not json:
        note(f"the queue of {name} {'is' if found['changed'] else 'was already'} paused.")
    for worker in found["ignored_by"]:
        note(f"{worker} is of an earlier release and takes jobs all the same; stop it.")


@models.command("resume")
def resume_model(
    name: ModelId, url: Url = DEFAULT_URL, key: Key = None, json: Json = False
) -> None:
    """Resumes a model's queue."""
    found = _queue(url, key, name, "resume", as_json=json)
    if not json:
        note(f"the queue of {name} {'is' if found['changed'] else 'was already'} open.")


def _queue(url: str, key: str | None, model: str, what: str, *, as_json: bool) -> dict[str, Any]:
    path = f"/v1/models/{quote(model, safe='/')}/{what}"
    found: dict[str, Any] = client_of(url, key).call("POST", path)
    if as_json:
        print_json(found)
    return found


@dead_letters.command("requeue")
def requeue_dead_letters(
    ids: Annotated[list[str] | None, typer.Argument(help="The jobs' ids.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    tenant: Tenant = None,
    model: OfModel = None,
    error: Annotated[str | None, typer.Option(help="Those with this error code.")] = None,
    all: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Yes = False,
) -> None:
    """Runs dead letters again, each as a new job: those that are named, or that match.

    Ends with 1 where the request of one was lost, or the queue was full.
    """
    wanted = {"tenant": tenant, "model": model, "error": error}
    of = bulk_choice(ids or [], wanted, every=all)
    client = client_of(url, key)
    run_bulk(client, "/v1/dead-letters/requeue", of, "requeue", as_json=json, confirmed=yes)


def bulk_choice(
    ids: Sequence[str], wanted: Mapping[str, str | None], *, every: bool
) -> dict[str, Any]:
    """Returns the body of a bulk request: ids, or a filter. Raises CommandError for neither, or for
    both."""
    chosen = {name: value for name, value in wanted.items() if value is not None}
    if bool(ids) == bool(chosen or every):
        raise CommandError("give ids, or a filter, or --all.", ExitCode.UNUSABLE)
    return {"ids": list(ids)} if ids else {"filter": chosen}


def run_bulk(
    client: Client, path: str, of: dict[str, Any], verb: str, *, as_json: bool, confirmed: bool
) -> None:
    """Does something to many jobs, after a confirmation with their number; prints what became of
    them. `of`: see `bulk_choice`. Raises CommandError where not all of it could be done."""
    if not confirmed:
        number = str(len(of["ids"])) if "ids" in of else _counted(client, path, of)
        if not sys.stdin.isatty():
            raise CommandError(f"{number} jobs; --yes does it without a question.")
        typer.confirm(f"{verb} {number} jobs?", abort=True, err=True)
    totals: dict[str, int] = {}
    stopped = None
    for body in _slices(of):
        after = None
        while stopped is None:
            found = client.call("POST", path, body | ({"after": after} if after else {}))
            for name, value in found.items():
                if isinstance(value, int) and not isinstance(value, bool):
                    totals[name] = totals.get(name, 0) + value
            stopped, after = found["stopped"], found["next"]
            if after is None:
                break
    if as_json:
        print_json({**totals, "stopped": stopped})
    else:
        words = [f"{number} {name.replace('_', ' ')}" for name, number in totals.items() if number]
        note(", ".join(words) or "nothing matches.")
    if stopped is not None:
        raise CommandError(f"not all of them: {stopped}")
    if totals.get("failed"):
        raise CommandError(f"{totals['failed']} could not be requeued: their requests are lost.")


def _counted(client: Client, path: str, of: dict[str, Any]) -> str:
    found = client.call("POST", path, of | {"dry_run": True})
    return f"{found['matched']}{' or more' if found['has_more'] else ''}"


def _slices(of: dict[str, Any]) -> list[dict[str, Any]]:
    if "filter" in of:
        return [of | {"limit": SLICE}]
    ids = of["ids"]
    return [{"ids": ids[at : at + SLICE]} for at in range(0, len(ids), SLICE)]
