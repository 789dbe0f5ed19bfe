"""OperatorDep: the caller of a route that only operators may call."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from api.http.caller import Caller, CallerDep
from api.request_errors import operator_required


async def get_operator(caller: CallerDep) -> Caller:
    """Raises ApiError (403) for a caller without an operator's rights."""
    if not caller.is_operator:
        raise operator_required("This changes the whole deployment and requires an operator's key.")
    return caller


OperatorDep = Annotated[Caller, Depends(get_operator)]


def who(operator: Caller) -> dict[str, str]:
    """Returns what an audit line names an operator by: no part of a key can be made of it."""
    return {
        "key_id": operator.key_id or "none",
        "tenant": operator.tenant,
        "request_id": operator.request_id,
    }
