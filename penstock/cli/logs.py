"""`penstock logs`: the log of a job, its tokens folded into one line for each attempt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.jobs import Id, named
from penstock.cli.options import DEFAULT_PATIENCE_S, DEFAULT_URL, Json, Key, Url
from penstock.cli.output import clock_time, loss_words, print_json, print_text
from penstock.cli.service import client_of
from penstock.client.requests import in_path

LOOK_S = 1.0  # between looks at a job that is followed
LIVE = ("queued", "running")


def logs(
    job: Id,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")
    ] = False,
) -> None:
    """Shows a job's log: when it was queued, started, lost its worker, resumed and ended, on which
    workers, with how many tokens.

    A lost worker has the time of its last token. `jobs follow` streams the text. Logs of processes
    are on the stderr of each: at the terminal of `penstock up`, in `docker compose logs`,
    `kubectl logs` or `journalctl`.
    """
    client = client_of(url, key, patience_s=DEFAULT_PATIENCE_S)
    path = f"/v1/jobs/{in_path(named(job))}"
    shown: set[tuple[str, int | None]] = set()
    while True:
        # A lost connection is tried again only once something was shown.
        found = client.call("GET", path, patience_s=None if shown else 0.0)
        for event in events_of(found):
            place = (event["event"], event.get("attempt"))
            if place in shown:
                continue
            shown.add(place)
            if json:
                print_json(event)
            else:
                after_s = event["at"] - found["created_at"]
                moment = f"{clock_time(event['at'])}  {after_s:+9.3f} s"
                print_text(f"{moment}  {_sentence(event)}\n")
        if not follow or found["status"] not in LIVE:
            return
        time.sleep(LOOK_S)


def events_of(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of a job so far, in their order: `event`, `at` in Unix seconds, and its
    facts. `tokens` are those that the job then has."""
    usage, attempts, first_at = job["usage"], job["attempts"], job["first_token_at"]
    yield {
        "event": "queued",
        "at": job["created_at"],
        "model": job["model"],
        "prompt_tokens": usage["prompt_tokens"],
    }
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        here = {"attempt": attempt["attempt"], "worker": attempt["worker"]}
        had = attempt["completion_tokens"]
        yield {"event": "started", "at": attempt["started_at"], **here, "tokens": had}
        if first_at is not None and (following is None or first_at < following["started_at"]):
            yield {"event": "first_token", "at": first_at, **here}
            first_at = None
        if attempt["outcome"] in ("died", "handed_over"):
            yield {
                "event": "lost" if attempt["outcome"] == "died" else "handed_over",
                "at": attempt["ended_at"] or attempt["started_at"],
                **here,
                "tokens": had + attempt["generated_tokens"],
                "cause": attempt["cause"],
            }
    if job["status"] not in LIVE:
        error = job["error"] or {}
        yield {
            "event": job["status"],
            "at": job["ended_at"],
            "tokens": usage["completion_tokens"],
            "reason": job["finish_reason"] or error.get("code"),
            "message": error.get("message"),
        }


def _sentence(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case "queued":
            return f"queued for {event['model']}, {event['prompt_tokens']} prompt tokens"
        case "started":
            kept = f", after token {event['tokens']}" if event["tokens"] else ""
            return f"attempt {event['attempt']} started on worker {event['worker']}{kept}"
        case "first_token":
            return f"first token, by worker {event['worker']}"
        case "handed_over" if event["cause"] is None:
            return f"handed over by worker {event['worker']} after token {event['tokens']}"
        case "lost" | "handed_over":
            return f"{loss_words(event['cause'], event['tokens'])}: {event['worker']}"
        case end:
            message = f": {event['message']}" if event["message"] else ""
            reason = f" ({event['reason']})" if event["reason"] else ""
            return f"{end}{reason} with {event['tokens']} output tokens{message}"
