"""Options that many commands have."""

from __future__ import annotations

from typing import Annotated

import typer

PREFIX = "PENSTOCK_"  # of settings; shared.environment has the same
DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "PENSTOCK_URL"
KEY_VARIABLE = "PENSTOCK_KEY"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        help="Any frontend of the service; several, separated by commas, are tried in turn.",
    ),
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar=KEY_VARIABLE, help="API key, where the service asks for one."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON, one object a line, and nothing else.")
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        min=0,
        help="Seconds in which a lost connection is tried again before the command gives up.",
    ),
]
DEFAULT_PATIENCE_S = 60.0
ModelName = Annotated[
    str | None, typer.Option("--model", "-m", help="Without it: the first that is served.")
]
