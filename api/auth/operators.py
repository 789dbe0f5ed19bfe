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


async def get_deployment_operator(caller: CallerDep) -> Caller:
    """Raises ApiError (403) also for a key without the mark `operator`: where all keys are of one
    tenant, each of them may look at everything, and none may stop the service."""
    operator = await get_operator(caller)
    if operator.scope is not None:
        raise operator_required("This changes the whole deployment and requires an operator's key.")
    return operator


OperatorDep = Annotated[Caller, Depends(get_operator)]
DeploymentOperatorDep = Annotated[Caller, Depends(get_deployment_operator)]


def who(operator: Caller) -> dict[str, str]:
    """Returns what an audit line names an operator by: no part of a key can be made of it."""
    return {
        "key_id": operator.key_id or "none",
        "tenant": operator.tenant,
        "request_id": operator.request_id,
    }
