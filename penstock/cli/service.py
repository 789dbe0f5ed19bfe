"""The service that a command asks."""

from __future__ import annotations

from contextlib import ExitStack

from penstock.cli.exits import CommandError, ExitCode
from penstock.client import (
    Client,
    Gone,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PenstockError,
    Unreachable,
)
from penstock.client.http import OnRecovery
from penstock.client.requests import first_model

_BAD_REQUEST = frozenset({400, 413, 422})  # other statuses, such as 409, are no flag's fault
_clients = ExitStack()


def client_of(
    url: str,
    key: str | None,
    *,
    patience_s: float = 0.0,
    timeout_s: float = 60.0,
    on_recovery: OnRecovery | None = None,
) -> Client:
    """Returns the client of the frontends at `url`, open until `close_clients`. Raises CommandError
    for an invalid URL."""
    try:
        client = Client(
            url, key=key, patience_s=patience_s, timeout_s=timeout_s, on_recovery=on_recovery
        )
    except ValueError as error:
        raise CommandError(str(error), ExitCode.UNUSABLE) from None
    return _clients.enter_context(client)


def close_clients() -> None:
    """Closes the connections of the command that ends."""
    _clients.close()


def chosen_model(client: Client, given: str | None, *, embeds: bool = False) -> str:
    """Returns the `given` model, else the first one with a live worker, else the first one that is
    known; with `embeds` one that makes embeddings. Raises PenstockError where the service has none,
    or is away."""
    if given:
        return given
    return first_model(client.call("GET", "/v1/models", patience_s=0.0)["data"], embeds=embeds)


def sentence_of(error: CommandError | PenstockError) -> str:
    """Returns the printed text of an error."""
    if isinstance(error, NotPermitted) and error.status == 401:
        return f"{error} Give a key with --key or PENSTOCK_KEY."
    if isinstance(error, Unreachable) and not error.job_id:
        return f"{error} `penstock up` starts one here; --url or PENSTOCK_URL names another."
    return str(error)


def exit_code_of(error: CommandError | PenstockError) -> ExitCode:
    """Returns what a command ends with that raised `error`."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, Unreachable):
        return ExitCode.NO_SERVICE
    if isinstance(error, NotPermitted):
        return ExitCode.REFUSED
    if isinstance(error, InvalidRequest) and error.status in _BAD_REQUEST:
        return ExitCode.UNUSABLE
    return ExitCode.NOT_FOUND if isinstance(error, NotFound | Gone) else ExitCode.FAILED
