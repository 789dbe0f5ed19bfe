"""Open requests are bounded; they end done, cut, or left by their client."""

from __future__ import annotations

import asyncio

import pytest

from api.errors import UnavailableError
from api.http.open_requests import Ending, OpenRequests


async def test_work_ends_when_the_client_leaves_is_cut_or_is_done() -> None:
    requests = OpenRequests(limit=2)

    async def never() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with requests.enter() as request:
        assert await request.run(gone, asyncio.Event().wait) is Ending.LEFT  # type: ignore[arg-type]
    with requests.enter() as request:
        assert await request.run(never, lambda: asyncio.sleep(0)) is Ending.DONE  # type: ignore[arg-type]
    with requests.enter() as request:
        asyncio.get_running_loop().call_soon(requests.cut_all)
        assert await request.run(never, asyncio.Event().wait) is Ending.CUT  # type: ignore[arg-type]

    async def broken() -> None:
        raise ZeroDivisionError

    with requests.enter() as request, pytest.raises(ZeroDivisionError):
        await request.run(never, broken)  # type: ignore[arg-type]
    assert len(requests) == 0


async def test_an_error_of_the_connection_and_a_cancel_from_elsewhere_are_raised() -> None:
    requests = OpenRequests(limit=1)

    async def never() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def too_large() -> dict[str, str]:
        raise ZeroDivisionError

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with requests.enter() as request, pytest.raises(ZeroDivisionError):
        await request.run(too_large, asyncio.Event().wait)  # type: ignore[arg-type]
    with requests.enter() as request, pytest.raises(asyncio.CancelledError):
        await request.run(never, cancelled)  # type: ignore[arg-type]


def test_open_requests_are_bounded_and_can_be_closed() -> None:
    requests = OpenRequests(limit=1)
    with requests.enter(), pytest.raises(UnavailableError) as full, requests.enter():
        pass
    assert full.value.code == "server_overloaded"
    requests.close("going down")
    with pytest.raises(UnavailableError, match="going down"), requests.enter():
        pass
