"""DurabilityChecks over Redis: WAITAOF and WAIT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from shared.messages import Durability
from shared.redis.connections import MAX_ACCEPT_WAIT_S, Connections
from shared.redis.pool import Command
from shared.transport.failures import translated
from shared.transport.ports.admission import DurabilityFault
from shared.transport.scripts import Scripts


class RedisDurability:
    """Implements DurabilityChecks. Safe for any number of tasks."""

    def __init__(self, connections: Connections, scripts: Scripts) -> None:
        self._accept = connections.accept
        self._scripts = scripts

    async def durability_fault(
        self, durability: Durability, num_replicas: int
    ) -> DurabilityFault | None:
        probe: Command = ("ROLE",) if durability is Durability.REPLICAS else ("WAITAOF", 1, 0, 1)
        with translated("durability"):
            (reply,) = await self._accept.exchange(probe)
        if isinstance(reply, ResponseError):
            return _fault_of_refusal(reply)
        if durability is Durability.REPLICAS:
            return _fault_of_role(reply, num_replicas)
        return None

    async def confirm(
        self,
        kind: str,
        names: Sequence[str],
        durability: Durability,
        num_replicas: int,
        timeout_s: float,
    ) -> bool:
        wait_ms = max(1, round(min(timeout_s, MAX_ACCEPT_WAIT_S) * 1000))
        wait: Command = ("WAITAOF", 1, 0, wait_ms)
        if durability is Durability.REPLICAS:
            wait = ("WAIT", num_replicas, wait_ms)
        all_words = [("confirm", kind, name, str(durability)) for name in names]
        commands = [self._scripts.command(*words) for words in all_words]
        with translated("confirm"):
            *found, reply = await self._accept.exchange(*commands, wait)
            if any(isinstance(answer, NoScriptError) for answer in found):
                commands[0] = self._scripts.text_command(*all_words[0])  # the others then know it
                *found, reply = await self._accept.exchange(*commands, wait)
            for answer in (*found, reply):
                if isinstance(answer, ResponseError):
                    raise answer
        if durability is Durability.REPLICAS:
            return all(found) and reply >= num_replicas
        return all(found) and reply[0] >= 1


def _fault_of_refusal(error: ResponseError) -> DurabilityFault:
    text = str(error)
    if "appendonly" in text:
        return DurabilityFault("the server's append-only file is off.", is_lasting=True)
    if "unknown command" in text.lower():
        sentence = "the server is older than Redis 7.2 and has no WAITAOF."
        return DurabilityFault(sentence, is_lasting=True)
    return DurabilityFault(f"the server refuses it ({text[:120]}).", is_lasting=False)


def _fault_of_role(role: Sequence[Any], num_replicas: int) -> DurabilityFault | None:
    if role[0] != b"master":
        return DurabilityFault("the server is itself a replica at the moment.", is_lasting=False)
    num_here = len(role[2])
    if num_here >= num_replicas:
        return None
    sentence = f"the server has {num_here} of {num_replicas} replicas."
    return DurabilityFault(sentence, is_lasting=False)
