"""Which model a command means."""

from __future__ import annotations

from penstock.cli.exits import CommandError
from penstock.cli.frontend import Frontend


def chosen_model(frontend: Frontend, given: str | None) -> str:
    """Returns the `given` model, else the first one with a live worker, else the first one that is
    known. Raises CommandError where the service has none."""
    if given:
        return given
    models = frontend.get("/v1/models")["data"]
    served = [model for model in models if model.get("is_served", True)]
    for model in (*served, *models):
        return str(model["id"])
    raise CommandError("the service has no model yet: no worker has announced one.")
