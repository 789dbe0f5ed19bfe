"""`penstock keys`: makes API keys, and lists those of a file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.options import Json
from penstock.cli.output import note, print_json, print_table
from penstock.rooms import reach_rooms

keys = typer.Typer(name="keys", help="Makes API keys and lists those of a file.")
Limit = Annotated[int | None, typer.Option(min=1, help="Limit of the tenant.")]


@keys.command()
def new(
    json: Json = False,
    tenant: Annotated[str, typer.Option(help="The tenant that owns the key's jobs.")] = "default",
    name: Annotated[str, typer.Option(help="Its name in logs.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="Sees all tenants' jobs.")] = False,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_jobs: Limit = None,
    max_queued_jobs: Limit = None,
    max_queued_tokens: Limit = None,
) -> None:
    """Makes a key: the key itself on stderr, its line for PENSTOCK_API_KEYS_FILE on stdout.

    penstock keys new --tenant acme >> keys.txt
    """
    _require_frontend()
    from api.auth.keys import KeysInvalid, new_key
    from api.keys import line_of

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_jobs": max_jobs,
        "max_queued_jobs": max_queued_jobs,
        "max_queued_tokens": max_queued_tokens,
    }
    key = new_key()
    try:
        line = line_of(key, tenant, name, is_operator=operator, limits=limits)
    except KeysInvalid as error:
        raise CommandError(str(error), ExitCode.UNUSABLE) from None
    if json:
        print_json({"key": key, "line": line, "tenant": tenant, "name": name})
        return
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(f"{line}\n")


@keys.command("list")
def list_keys(
    file: Annotated[Path, typer.Argument(help="The file of PENSTOCK_API_KEYS_FILE.")],
    json: Json = False,
) -> None:
    """Lists the keys of a file, by the beginnings of their digests. Ends with 2 for a bad one."""
    _require_frontend()
    from api.auth.keys import KeysInvalid, parse_keys

    try:
        found = parse_keys(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise CommandError(f"{file} cannot be read: {reason}.", ExitCode.UNUSABLE) from None
    except KeysInvalid as error:
        raise CommandError(str(error), ExitCode.UNUSABLE) from None
    rows = [
        {
            "digest": key.digest[:19],
            "tenant": key.tenant,
            "name": key.name,
            "operator": key.is_operator,
            "disabled": key.is_disabled,
            "limits": dict(key.limits),
        }
        for key in found
    ]
    if json:
        for row in rows:
            print_json(row)
        return
    cells = [
        (
            row["digest"],
            row["tenant"],
            row["name"] or None,
            ", ".join(word for word in ("operator", "disabled") if row[word]) or None,
            ", ".join(f"{limit}={value}" for limit, value in _limits(row)) or None,
        )
        for row in rows
    ]
    print_table(("digest", "tenant", "name", "marks", "limits"), cells, f"{file} has no key.")
    if cells and all(cell[3] and "disabled" in cell[3] for cell in cells):
        note("all of them are disabled")


def _limits(row: dict[str, object]) -> list[tuple[str, int]]:
    limits = row["limits"]
    assert isinstance(limits, dict)
    return list(limits.items())


def _require_frontend() -> None:
    reach_rooms()
    if importlib.util.find_spec("fastapi") is None:
        raise CommandError(
            "keys are the frontend's: pip install 'penstock[api]'", ExitCode.UNUSABLE
        )
