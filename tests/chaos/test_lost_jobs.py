"""The server loses jobs that it had accepted: the process that holds one puts it back.

Nobody reads these jobs, so no stream notices: their workers and frontends must.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

TERMINAL = frozenset({"completed", "failed", "cancelled", "incomplete"})
PATIENCE_S = 60.0


class Background:
    """Background responses, requested at one frontend after the other."""

    def __init__(self, scenario: Scenario, client: httpx.AsyncClient) -> None:
        self._stage = scenario
        self._client = client
        self._number = 0

    async def begin(self, num_tokens: int = 60, **more: Any) -> str:
        """The id of one that was accepted."""
        self._number += 1
        requested = {
            "model": self._stage.deployment.model,
            "input": f"the gate and the wheel, number {self._number}",
            "max_output_tokens": num_tokens,
            "ignore_eos": True,
            "background": True,
            "store": True,
            **more,
        }
        response = await self._client.post(f"{self._url()}/v1/responses", json=requested)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def get(self, name: str) -> httpx.Response:
        return await self._client.get(f"{self._url()}/v1/responses/{name}")

    async def status(self, name: str) -> str:
        """'404' where it is not known."""
        response = await self.get(name)
        return str(response.json()["status"] if response.status_code == 200 else "404")

    async def delete(self, name: str) -> None:
        response = await self._client.delete(f"{self._url()}/v1/responses/{name}")
        assert response.status_code == 200, response.text

    async def cancel(self, name: str) -> None:
        response = await self._client.post(f"{self._url()}/v1/responses/{name}/cancel")
        assert response.json()["status"] == "cancelled", response.text

    async def all_in(self, names: Sequence[str], statuses: frozenset[str], what: str) -> None:
        async def are() -> bool:
            found = {name: await self.status(name) for name in names}
            assert set(found.values()) <= statuses, found
            return True

        await until(are, what, PATIENCE_S)

    async def texts(self, names: Sequence[str]) -> list[str]:
        """Of responses that have completed or were cut by their length, as asked."""
        found = []
        for name in names:
            body = (await self.get(name)).json()
            assert body["usage"]["output_tokens"] == 60, body
            found.append(body["output"][0]["content"][0]["text"])
        return found

    def _url(self) -> str:
        urls = self._stage.deployment.urls()
        return urls[self._number % len(urls)]


@pytest.fixture
async def background(scenario: Scenario) -> AsyncIterator[Background]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield Background(scenario, client)


@asynccontextmanager
async def throttled(scenario: Scenario, after_tokens: int) -> AsyncIterator[None]:
    scenario.deployment.throttle.apply(after_tokens)
    try:
        yield
    finally:
        scenario.deployment.throttle.release()


async def logged(scenario: Scenario, names: Sequence[str], num_tokens: int) -> None:
    """Returns when each of these has so many tokens in its log."""

    async def are() -> bool:
        for name in names:
            fields = await scenario.job(name.removeprefix("resp_"))
            assert int(fields.get("n", 0)) >= num_tokens, fields
        return True

    await until(are, "tokens in the log", PATIENCE_S)


async def undisturbed(scenario: Scenario, background: Background, count: int) -> list[str]:
    """What these responses say when nothing happens; the numbers begin again afterwards."""
    names = [await background.begin() for _ in range(count)]
    await background.all_in(names, frozenset({"completed", "incomplete"}), "the calm ones")
    background._number -= count
    return await background.texts(names)


async def test_background_responses_outlive_the_loss_of_the_file_since_they_were_accepted(
    scenario: Scenario, background: Background
) -> None:
    server = scenario.deployment.server
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=2)
    expected = await undisturbed(scenario, background, 4)
    async with throttled(scenario, 20):
        size = server.file_size()
        names = [await background.begin() for _ in range(4)]  # two of them wait
        await logged(scenario, names[:2], 20)
        server.kill()
        assert server.cut_tail(server.file_size() - size) > 0
        server.start()
        await until(lambda: _no_job(scenario, names), "the loss to show", PATIENCE_S)
    await background.all_in(names, frozenset({"completed", "incomplete"}), "all to end")
    assert await background.texts(names) == expected
    await scenario.settled()


async def _no_job(scenario: Scenario, names: Sequence[str]) -> bool:
    """Or so quickly put back that it shows in the worker's log alone."""
    worker = scenario.deployment.workers[0]
    gone = [not await scenario.job(name.removeprefix("resp_")) for name in names]
    return any(gone) or "restored a job that Redis had lost" in worker.log


@pytest.mark.promise(
    "Responses: an accepted response ends and can be retrieved, also if Redis loses it: its worker "
    "or its frontend puts it back (while one of the two lives)"
)
async def test_background_responses_outlive_an_emptied_server(
    scenario: Scenario, background: Background
) -> None:
    await scenario.deployment.use_workers(2, MAX_NUM_SEQS=4)
    expected = await undisturbed(scenario, background, 20)
    async with throttled(scenario, 20):
        names = [await background.begin() for _ in range(20)]  # twelve of them wait
        await until(lambda: _num_running(scenario, 8), "eight to run")
        await scenario.redis.flushall()
    scenario.oracle.begin_at_zero()
    await background.all_in(names, frozenset({"completed", "incomplete"}), "all to end")
    assert await background.texts(names) == expected
    await scenario.settled()


async def _num_running(scenario: Scenario, number: int) -> bool:
    return (await scenario.transport.registry.queue_stats()).running == number


@pytest.mark.parametrize("how", ["flush", "lost tail"])
async def test_what_was_deleted_or_cancelled_before_the_loss_does_not_come_back(
    scenario: Scenario, background: Background, how: str
) -> None:
    server = scenario.deployment.server
    await scenario.deployment.use_workers(1, MAX_NUM_SEQS=2)
    async with throttled(scenario, 20):
        deleted, cancelled, kept, waiting = [await background.begin() for _ in range(4)]
        await logged(scenario, [deleted, cancelled], 20)
        await background.delete(deleted)
        await background.cancel(cancelled)
        await logged(scenario, [kept], 1)
        await asyncio.sleep(2.5)  # each frontend has looked at its jobs since
        later = server.file_size()
        last = await background.begin()
        if how == "flush":
            await scenario.redis.flushall()
            scenario.oracle.begin_at_zero()
        else:
            server.kill()
            server.cut_tail(server.file_size() - later)
            server.start()
    ends = frozenset({"completed", "incomplete"})
    await background.all_in([kept, waiting, last], ends, "the others to end")
    assert await background.status(deleted) == "404"
    assert await background.status(cancelled) == ("404" if how == "flush" else "cancelled")
    # The totals count the deleted one, of which nothing is kept.
    await scenario.oracle.settled(scenario.deployment.worker_ids(), all_kept=False)
    scenario.is_settled = True


async def test_a_job_that_was_put_back_outlives_the_death_of_its_worker(
    scenario: Scenario, background: Background
) -> None:
    await scenario.deployment.use_workers(2, MAX_NUM_SEQS=4)
    (expected,) = await undisturbed(scenario, background, 1)
    async with throttled(scenario, 20):
        name = await background.begin()
        await logged(scenario, [name], 20)
        worker = await scenario.worker_of(name.removeprefix("resp_"))
        await scenario.redis.flushall()
        scenario.oracle.begin_at_zero()
        await logged(scenario, [name], 20)
        worker.kill()
    await background.all_in([name], frozenset({"completed", "incomplete"}), "it to end")
    assert await background.texts([name]) == [expected]
    assert int((await scenario.job(name.removeprefix("resp_")))["attempt"]) >= 2
    await scenario.settled()
