"""The pool for CPU-bound work on text: bounded in bytes, fair between small and large."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest
from starlette.requests import ClientDisconnect

from api.errors import UnavailableError
from api.generation import thread_pool as text_pool
from api.generation.thread_pool import (
    MIN_BYTES,
    SMALL_BYTES,
    TextPool,
    client_gone,
    request_bytes,
)
from api.http.accounts import Accounts
from api.http.shares import Payer, payer
from shared.cpu_time import add_cpu_s


async def test_the_text_pool_refuses_what_it_cannot_hold() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2 * MIN_BYTES), threading.Event()
    waiting = [asyncio.create_task(pool.run(release.wait, 20)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    waiting[0].cancel()  # its caller leaves: the place stays taken until the thread has had it
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    release.set()
    assert await waiting[1]
    with anyio.fail_after(10):
        while len(pool):
            await asyncio.sleep(0.001)
    assert await pool.run(len, "abc") == 3
    pool.close()


@pytest.mark.promise("Access: a burst of 300 requests in one instant is queued, not refused")
async def test_what_waits_for_a_text_thread_is_bounded_in_bytes_and_one_may_always_wait() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    waiting = [asyncio.create_task(pool.run(release.wait, 20))]
    await asyncio.sleep(0)

    async def large() -> int:
        request_bytes.set(20 * MIN_BYTES)
        return await pool.run(len, "large")

    waiting += [asyncio.create_task(large()) for _ in range(2)]  # type: ignore[misc]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError) as full:
        await asyncio.create_task(large())
    assert full.value.code == "server_overloaded"
    small = asyncio.create_task(pool.run(len, "abc"))  # large ones do not take its place
    release.set()
    assert await asyncio.gather(*waiting, small) == [True, 5, 5, 3]
    pool.close()


async def test_small_text_does_not_wait_for_large_text() -> None:
    pool, release = TextPool(threads=2, max_waiting_bytes=2**20), threading.Event()

    async def large() -> bool:
        request_bytes.set(SMALL_BYTES + 1)
        return await pool.run(release.wait, 20)

    waiting = [asyncio.create_task(large()) for _ in range(4)]
    await asyncio.sleep(0)
    with anyio.fail_after(10):
        assert [await pool.run(len, "abc") for _ in range(20)] == [3] * 20
    assert not any(task.done() for task in waiting)
    release.set()
    assert all(await asyncio.gather(*waiting))
    pool.close()


async def test_small_text_does_not_starve_large_text() -> None:
    pool, is_over = TextPool(threads=2, max_waiting_bytes=2**20), threading.Event()

    async def flood() -> None:
        while not is_over.is_set():
            await pool.run(time.sleep, 0.001)

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    await asyncio.sleep(0.01)
    request_bytes.set(SMALL_BYTES + 1)
    with anyio.fail_after(10):
        assert [await pool.run(len, "abc") for _ in range(20)] == [3] * 20
    is_over.set()
    await asyncio.gather(*floods)
    pool.close()


async def test_a_closed_text_pool_cancels_what_waits() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2**20), threading.Event()
    at_work, waits = (asyncio.create_task(pool.run(release.wait, 20)) for _ in range(2))
    await asyncio.sleep(0.05)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert pool.num_busy == 1
    release.set()
    assert await at_work


async def test_what_waits_too_long_for_a_text_thread_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_pool, "MAX_WAIT_S", 0.05)
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0)
    begun: list[int] = []
    with pytest.raises(UnavailableError):
        await pool.run(begun.append, 1)
    with anyio.fail_after(10):
        while len(pool) > 1:  # what was given up leaves its place
            await asyncio.sleep(0.001)
    release.set()
    assert await at_work, "what a thread is at is not given up"
    assert await pool.run(len, "abc") == 3
    assert not begun
    pool.close()


async def test_waiting_work_is_dropped_with_its_caller() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    at_work = asyncio.create_task(pool.run(release.wait, 20))
    begun: list[int] = []
    waits = asyncio.create_task(pool.run(begun.append, 1))
    with anyio.fail_after(10):
        while pool.num_busy == 0:
            await asyncio.sleep(0.001)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.sleep(0)
    assert len(pool) == 1, "its place is free at once"
    release.set()
    assert await at_work
    assert await pool.run(len, "abc") == 3
    assert not begun
    pool.close()


async def test_waiting_work_is_dropped_when_its_client_has_gone() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=10 * MIN_BYTES), threading.Event()
    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0)
    gone, begun = asyncio.Event(), list[int]()

    async def of_client() -> None:
        async def leaves() -> None:
            await gone.wait()

        client_gone.set(leaves)
        await pool.run(begun.append, 1)

    waits = asyncio.create_task(of_client())
    gone.set()
    with anyio.fail_after(10), pytest.raises(ClientDisconnect):
        await waits
    release.set()
    assert await at_work
    assert await pool.run(len, "abc") == 3
    assert not begun
    pool.close()


async def test_text_threads_serve_tenants_by_turns() -> None:
    """A tenant with one request waits for one of another's, not for its whole queue."""
    pool, release = TextPool(threads=1, max_waiting_bytes=2**20), threading.Event()
    order: list[str] = []

    def work(name: str) -> None:
        time.sleep(0.002)
        order.append(name)

    async def of_tenant(name: str) -> None:
        payer.set(Payer(name))
        await pool.run(work, name)

    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0.01)
    tasks = [asyncio.create_task(of_tenant("many")) for _ in range(40)]
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(of_tenant("one"))]
    await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(at_work, *tasks)
    assert order.index("one") <= 1
    pool.close()


async def test_a_tenant_that_has_used_the_threads_waits_for_one_that_has_not() -> None:
    pool = TextPool(threads=1, max_waiting_bytes=2**20)
    order: list[str] = []

    def work(name: str, seconds: float) -> None:
        _use_cpu(seconds)
        order.append(name)

    async def of_tenant(name: str, seconds: float) -> None:
        payer.set(Payer(name))
        await pool.run(work, name, seconds)

    expensive = [asyncio.create_task(of_tenant("expensive", 0.2)) for _ in range(2)]
    await asyncio.sleep(0.01)
    cheap = [asyncio.create_task(of_tenant("cheap", 0.001)) for _ in range(10)]
    await asyncio.gather(*expensive, *cheap)
    assert order == ["expensive", *["cheap"] * 10, "expensive"]
    pool.close()


@pytest.mark.parametrize(("threads", "share", "most"), [(1, 0.75, 1), (2, 0.75, 1), (4, 0.5, 2)])
async def test_the_small_work_of_one_tenant_has_its_share_of_the_threads(
    threads: int, share: float, most: int
) -> None:
    pool, release = TextPool(threads, 2**20, share), threading.Event()
    payer.set(Payer("many"))
    waiting = [asyncio.create_task(pool.run(release.wait, 20)) for _ in range(threads + 2)]
    with anyio.fail_after(10):
        while pool.num_busy < most:
            await asyncio.sleep(0.001)
        payer.set(Payer("one"))
        if most < threads:
            assert await pool.run(len, "abc") == 3, "another tenant waits for none of it"
        while pool.num_busy != most:  # a thread is busy for a moment after its work has ended
            await asyncio.sleep(0.001)
    release.set()
    assert all(await asyncio.gather(*waiting))
    pool.close()


async def test_the_large_work_of_one_tenant_leaves_its_small_work_a_thread() -> None:
    pool, release = TextPool(threads=2, max_waiting_bytes=2**20), threading.Event()
    payer.set(Payer("many"))

    async def large() -> bool:
        request_bytes.set(SMALL_BYTES + 1)
        return await pool.run(release.wait, 20)

    waiting = [asyncio.create_task(large()) for _ in range(2)]
    await asyncio.sleep(0)
    with anyio.fail_after(10):
        assert [await pool.run(len, "abc") for _ in range(20)] == [3] * 20
    release.set()
    assert all(await asyncio.gather(*waiting))
    pool.close()


async def test_the_waiting_text_of_one_tenant_leaves_room_for_others() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=40 * MIN_BYTES), threading.Event()

    async def of_tenant(name: str) -> bool:
        payer.set(Payer(name))
        return await pool.run(release.wait, 20)

    waiting = [asyncio.create_task(of_tenant("many")) for _ in range(60)]
    await asyncio.sleep(0.01)
    refused = [task for task in waiting if task.done()]
    assert {task.exception().code for task in refused} == {"tenant_share_exceeded"}  # type: ignore[union-attr]
    assert len(refused) == 30, "three quarters of forty places are its"
    other = asyncio.create_task(of_tenant("one"))
    release.set()
    assert await other
    await asyncio.gather(*waiting, return_exceptions=True)
    pool.close()


def _use_cpu(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


async def test_the_processor_time_of_failed_and_of_delegated_work_is_charged_to_its_tenant() -> (
    None
):
    accounts = Accounts()
    pool = TextPool(threads=1, max_waiting_bytes=2**20, charge=accounts.charge)

    def fails() -> None:
        _use_cpu(0.02)
        add_cpu_s(3.0)  # of another process
        raise ValueError("refused")

    async def of_tenant(name: str) -> None:
        payer.set(Payer(name))
        with pytest.raises(ValueError, match="refused"):
            await pool.run(fails)
        await pool.run(time.sleep, 0.05)

    await asyncio.create_task(of_tenant("one"))
    pool.close()
    (spent,) = accounts.drain()
    assert (spent.tenant, spent.refused) == ("one", 0)
    assert 3.02 <= spent.cpu_us / 1e6 < 3.02 + 0.05, "sleeping uses no processor"
    assert accounts.drain() == []


async def test_who_used_most_elsewhere_goes_last() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2**20), threading.Event()
    order: list[str] = []

    async def of_tenant(name: str) -> None:
        payer.set(Payer(name))
        await pool.run(order.append, name)

    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0.01)
    pool.charge({"masks": 0.5, "most": 3600.0})
    names = ["most", "masks", *["little"] * 5]
    tasks = [asyncio.create_task(of_tenant(name)) for name in names]
    await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(at_work, *tasks)
    assert order == [*["little"] * 5, "masks", "most"]
    pool.close()


@pytest.mark.promise(
    "Neighbours: processor seconds of text, grammars and masks and refused requests are charged to "
    "the tenant that asked, also where the request fails; who used most goes last at the text "
    "threads, for a bounded time"
)
async def test_who_used_most_waits_for_a_bounded_time_of_the_others_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_pool, "MAX_AHEAD_S", 0.05)
    pool, release = TextPool(threads=1, max_waiting_bytes=2**20), threading.Event()
    order: list[str] = []

    def work(name: str) -> None:
        _use_cpu(0.02)
        order.append(name)

    async def of_tenant(name: str) -> None:
        payer.set(Payer(name))
        await pool.run(work, name)

    at_work = asyncio.create_task(pool.run(release.wait, 20))
    await asyncio.sleep(0.01)
    pool.charge({"most": 3600.0})
    tasks = [asyncio.create_task(of_tenant(name)) for name in ("most", *["little"] * 9)]
    await asyncio.sleep(0.01)
    release.set()
    await asyncio.gather(at_work, *tasks)
    assert order.index("most") == 3
    pool.close()


def test_a_frontend_learns_what_tenants_used_elsewhere() -> None:
    accounts = Accounts()
    assert accounts.elsewhere({"one": 9_000_000}) == {}, "before its start"
    accounts.charge("one", 2.0)
    spent = accounts.drain()
    assert accounts.elsewhere({"one": 11_000_000}) == {"one": 2.0}, "not known to be its own yet"
    accounts.reported(spent)
    assert accounts.elsewhere({"one": 11_000_000}) == {}
    assert accounts.elsewhere({"one": 13_500_000, "two": 1_000_000}) == {"one": 0.5, "two": 1.0}
    assert accounts.elsewhere({"one": 1_000_000}) == {}, "the store has lost its totals"
    assert accounts.elsewhere({"one": 3_000_000}) == {"one": 2.0}
    accounts.give_back(spent)
    assert accounts.drain() == spent
