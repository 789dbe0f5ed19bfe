"""The parts of the running application, as FastAPI dependencies by their type.

`api.main` makes the parts once and sets them as `app.state.parts`, which no other module reads.
A part is named for routes where its class is defined, e.g. `JobsDep` in `api.jobs.service`, so that
a route imports what it uses and nothing else.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

Part = TypeVar("Part")


def part_in(scope: Scope, kind: type[Part]) -> Part:
    """Returns the application's instance of `kind`. Raises KeyError where it has none."""
    part: Part = scope["app"].state.parts[kind]
    return part


def provided(kind: type[Part]) -> Any:
    """Returns the dependency of a route on the application's instance of `kind`."""

    # A coroutine: FastAPI runs other functions in threads.
    async def get(request: Request) -> Part:
        return part_in(request.scope, kind)

    return Depends(get)
