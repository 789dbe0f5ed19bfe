from __future__ import annotations

import asyncio

from shared.transport.event_bus import ReusableTimer

LONG_S = 30.0


async def test_a_wake_ends_the_wait_and_the_next_wait_is_another() -> None:
    loop, waiting = asyncio.get_running_loop(), ReusableTimer()
    for _ in range(3):
        begun_s = loop.time()
        loop.call_soon(waiting.wake)
        await waiting.wait(LONG_S)
        assert loop.time() - begun_s < LONG_S / 2
    waiting.close()


async def test_a_wait_is_over_in_time_whatever_came_before_it() -> None:
    loop, waiting = asyncio.get_running_loop(), ReusableTimer()
    loop.call_soon(waiting.wake)
    await waiting.wait(LONG_S)
    for timeout_s in (0.05, 0.0, 0.1, 0.02):  # sooner and later than the timer that is running
        begun_s = loop.time()
        await waiting.wait(timeout_s)
        assert timeout_s - 0.005 <= loop.time() - begun_s < LONG_S / 2
    loop.call_later(0.01, waiting.wake)
    await waiting.wait(0.05)
    begun_s = loop.time()
    await waiting.wait(0.2)  # the timer of the one before rings meanwhile
    assert loop.time() - begun_s >= 0.19
    waiting.close()


async def test_a_cancelled_wait_leaves_no_timer() -> None:
    waiting = ReusableTimer()
    task = asyncio.create_task(waiting.wait(LONG_S))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    waiting.wake()
    await waiting.wait(0.01)
    waiting.close()
    waiting.close()
