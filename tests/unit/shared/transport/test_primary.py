"""The primary is looked up anew, in one search for all, and accepted only when confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError

from shared.redis import topology
from shared.redis.topology import (
    ClusterFinder,
    Found,
    PrimaryResolver,
    PrimaryUnknown,
    SentinelFinder,
    WrongTopology,
)
from shared.redis.url import Address

A, B, C = ("a", 1), ("b", 2), ("c", 3)


class Answers:
    """A finder that says what the test told it, and remembers whom it asked."""

    def __init__(self, answers: Mapping[Address, Found | Exception]) -> None:
        self.answers = dict(answers)
        self.seeds: list[Address] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def find(self, seed: Address) -> Found:
        self.seeds.append(seed)
        await self.gate.wait()
        answer = self.answers[seed]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_the_first_seed_that_answers_is_tried_first_from_then_on() -> None:
    finder = Answers({A: RedisConnectionError(), B: Found(C)})
    where = PrimaryResolver([A, B], finder)
    assert where.latest is None
    assert await where.locate() == C
    assert await where.locate() == C
    assert finder.seeds == [A, B, B]
    assert where.latest == C


async def test_servers_learned_on_the_way_answer_when_the_given_ones_are_gone() -> None:
    finder = Answers({A: Found(B, others=[B, C]), B: RedisConnectionError(), C: Found(C)})
    where = PrimaryResolver([A], finder)
    assert await where.locate() == B
    finder.answers[A] = RedisConnectionError()
    assert await where.locate() == C
    assert finder.seeds == [A, A, B, C]


async def test_concurrent_callers_share_a_later_search() -> None:
    finder = Answers({A: Found(B)})
    finder.gate.clear()
    where = PrimaryResolver([A], finder)
    first = asyncio.create_task(where.locate())
    await asyncio.sleep(0)
    others = [asyncio.create_task(where.locate()) for _ in range(10)]
    await asyncio.sleep(0)
    finder.answers[A] = Found(C)  # what the first search will see, too: it has not answered yet
    finder.gate.set()
    assert await first == C
    assert await asyncio.gather(*others) == [C] * 10
    assert finder.seeds == [A, A]


async def test_a_cancelled_search_answers_no_other_caller() -> None:
    finder = Answers({A: Found(B)})
    finder.gate.clear()
    where = PrimaryResolver([A], finder)
    first = asyncio.create_task(where.locate())
    await asyncio.sleep(0)
    second = asyncio.create_task(where.locate())
    await asyncio.sleep(0)
    first.cancel()
    finder.gate.set()
    assert await second == B


async def test_a_failed_search_is_shared_too_and_repeated_later() -> None:
    finder = Answers({A: PrimaryUnknown("nobody serves")})
    finder.gate.clear()
    where = PrimaryResolver([A], finder)
    tasks = [asyncio.create_task(where.locate()) for _ in range(5)]
    await asyncio.sleep(0)
    finder.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["nobody serves"] * 5
    assert len(finder.seeds) == 2
    finder.answers[A] = Found(B)
    assert await where.locate() == B


async def test_a_silent_seed_costs_its_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "SEARCH_TIMEOUT_S", 0.05)
    finder = Answers({A: Found(A), B: Found(C)})
    finder.gate.clear()
    where = PrimaryResolver([A, B], finder)
    with pytest.raises(PrimaryUnknown, match="in time"):
        await where.locate()
    finder.gate.set()
    assert await where.locate() == C
    assert finder.seeds == [A, B]


async def test_a_wrong_kind_of_server_is_reported_unless_another_seed_answers() -> None:
    finder = Answers({A: WrongTopology("no sentinel"), B: RedisConnectionError()})
    where = PrimaryResolver([A, B], finder)
    with pytest.raises(WrongTopology, match="no sentinel"):
        await where.locate()
    finder.answers[B] = Found(C)
    assert await where.locate() == C


class Connection:
    """A connection to a server that answers from a table."""

    def __init__(self, replies: Mapping[str, Any], closed: list[int]) -> None:
        self._replies = replies
        self._closed = closed
        self._reply: Any = None

    async def connect(self) -> None:
        if not self._replies:
            raise RedisConnectionError("refused")

    async def send_command(self, *command: str) -> None:
        self._reply = self._replies[" ".join(command[:2])]

    async def read_response(self) -> Any:
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply

    async def disconnect(self, nowait: bool) -> None:
        self._closed.append(1)


def servers(table: Mapping[Address, Mapping[str, Any]]) -> Callable[[Address], Any]:
    return lambda address: Connection(table.get(address, {}), [])


NAMES_B = {"SENTINEL GET-MASTER-ADDR-BY-NAME": [b"b", b"2"]}


@pytest.mark.parametrize("role", [[b"master", 1, []], NoPermissionError("no")])
async def test_a_sentinels_primary_is_believed_when_it_agrees(role: Any) -> None:
    network = servers({A: NAMES_B, B: {"ROLE": role}})
    assert await SentinelFinder("main", network, network).find(A) == Found(B)


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ({A: NAMES_B, B: {"ROLE": [b"slave", b"a"]}}, PrimaryUnknown, "a replica"),
        ({A: NAMES_B}, RedisConnectionError, "refused"),
        ({A: {"SENTINEL GET-MASTER-ADDR-BY-NAME": None}}, PrimaryUnknown, "named 'main'"),
        (
            {A: {"SENTINEL GET-MASTER-ADDR-BY-NAME": ResponseError("unknown command 'SENTINEL'")}},
            WrongTopology,
            "not a sentinel",
        ),
    ],
)
async def test_a_sentinels_word_is_not_enough(
    table: dict[Address, Any], error: type[Exception], words: str
) -> None:
    network = servers(table)
    with pytest.raises(error, match=words):
        await SentinelFinder("main", network, network).find(A)


def slots(owner: tuple[bytes | None, int]) -> list[Any]:
    """Everything belongs to one node, with C as its replica."""
    return [[0, 16383, [owner[0], owner[1], b"id1"], [b"c", 3, b"id2", []]]]


OK = b"cluster_enabled:1\r\ncluster_state:ok\r\n"


async def test_a_slots_owner_is_believed_when_it_agrees() -> None:
    network = servers(
        {
            A: {"CLUSTER SLOTS": slots((b"b", 2))},
            B: {"CLUSTER SLOTS": slots((b"b", 2)), "CLUSTER INFO": OK},
        }
    )
    assert await ClusterFinder("{p0}", network).find(A) == Found(B, [B, C])


@pytest.mark.parametrize("unknown", [b"", None])
async def test_a_node_without_an_address_has_that_of_the_seed(unknown: bytes | None) -> None:
    view = {"CLUSTER SLOTS": slots((unknown, 1)), "CLUSTER INFO": NoPermissionError("no")}
    assert (await ClusterFinder("{p0}", servers({A: view})).find(A)).address == A


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ({A: {"CLUSTER SLOTS": []}}, PrimaryUnknown, "serves slot"),
        (
            {A: {"CLUSTER SLOTS": slots((b"b", 2))}, B: {"CLUSTER SLOTS": slots((b"a", 1))}},
            PrimaryUnknown,
            "disagree",
        ),
        (
            {A: {"CLUSTER SLOTS": slots((b"a", 1)), "CLUSTER INFO": b"cluster_state:fail"}},
            PrimaryUnknown,
            "down",
        ),
        ({A: {"CLUSTER SLOTS": slots((b"b", 2))}}, RedisConnectionError, "refused"),
        (
            {A: {"CLUSTER SLOTS": ResponseError("instance has cluster support disabled")}},
            WrongTopology,
            "not in cluster mode",
        ),
    ],
)
async def test_a_nodes_word_is_not_enough(
    table: dict[Address, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await ClusterFinder("{p0}", servers(table)).find(A)
