from __future__ import annotations

import asyncio
import gc

import pytest

from shared.tasks import cancel_and_wait, first_of


async def test_a_task_that_loses_its_first_cancellation_is_cancelled_again() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_and_wait(task), 5)
    assert task.cancelled()


async def test_tasks_that_have_ended_need_no_cancelling() -> None:
    async def quick() -> int:
        return 1

    task = asyncio.create_task(quick())
    await task
    await cancel_and_wait(task)
    await cancel_and_wait()
    assert task.result() == 1


async def test_the_first_to_be_done_ends_the_wait_and_tasks_of_others_go_on() -> None:
    forever = asyncio.create_task(asyncio.Event().wait())
    done = asyncio.Event()
    done.set()
    await asyncio.wait_for(first_of(forever, done.wait(), asyncio.Event().wait()), 5)
    assert not forever.done()
    await first_of(forever, timeout_s=0.001)
    assert not forever.done()
    await cancel_and_wait(forever)


async def test_a_task_that_forgets_a_cancel_is_cancelled_again() -> None:
    forgotten = []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                forgotten.append(1)
                if len(forgotten) == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_and_wait(task), 10)
    assert len(forgotten) == 3


async def test_an_exception_that_no_caller_retrieves_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(text: str) -> None:
        raise RuntimeError(text)

    tasks = [asyncio.create_task(fail("the first")), asyncio.create_task(fail("the second"))]
    await asyncio.wait(tasks)
    with pytest.raises(RuntimeError, match="the first"):
        tasks[0].result()
    await cancel_and_wait(*tasks)
    tasks.clear()
    gc.collect()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the second"
