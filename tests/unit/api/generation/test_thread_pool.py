"""The pool for CPU-bound work on text: bounded in bytes, fair between small and large."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest

from api.errors import UnavailableError
from api.generation import thread_pool as text_pool
from api.generation.thread_pool import MIN_BYTES, SMALL_BYTES, TextPool, request_bytes


async def test_the_text_pool_refuses_what_it_cannot_hold() -> None:
    pool, release = TextPool(threads=1, max_waiting_bytes=2 * MIN_BYTES), threading.Event()
    waiting = [asyncio.create_task(pool.run(release.wait, 20)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    waiting[1].cancel()  # its caller leaves: the place stays taken until the thread had it
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await pool.run(len, "abc")
    release.set()
    assert await waiting[0]
    with anyio.fail_after(10):
        while pool._num_taken:
            await asyncio.sleep(0.001)
    assert await pool.run(len, "abc") == 3
    pool.close()


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
