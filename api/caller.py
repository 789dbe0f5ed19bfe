"""Caller: whose request it is and what it is called, whatever it came in."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from api.access import DEFAULT_TENANT, access_of
from api.idempotency import idempotency_of
from api.request_id import RequestNames, names_of
from shared.messages import Idempotency


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: an HTTP request, or a row of a batch."""

    names: RequestNames
    tenant: str = DEFAULT_TENANT
    idempotency: Idempotency | None = None


def caller_of(request: Request) -> Caller:
    """The caller of an HTTP request, once its body has been read."""
    return Caller(names_of(request), access_of(request).tenant, idempotency_of(request))
