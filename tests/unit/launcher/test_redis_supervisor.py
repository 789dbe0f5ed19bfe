"""The private server is started again when it dies, with pauses, and not for ever."""

from __future__ import annotations

import asyncio

import pytest

from penstock.launcher import processes as restarts
from penstock.launcher.processes import GaveUp, RedisSupervisor, RestartPolicy


class FakeServer:
    """Dies on request; `answers` while it lives."""

    version = "valkey-server 9.1.2"

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.num_starts = 1
        self.dies_at_once = False

    def respawn(self) -> None:
        self.num_starts += 1
        self.exit_code = 1 if self.dies_at_once else None

    def answers(self) -> bool:
        return self.exit_code is None

    def last_log_line(self) -> str:
        return "Bad file format reading the append only file"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr("penstock.launcher.processes.POLL_S", 0.001)


async def test_a_server_that_dies_is_restarted_and_reported() -> None:
    server, output = FakeServer(), list[str]()
    keeping = asyncio.create_task(RedisSupervisor(server, output.append).supervise())
    try:
        server.exit_code = -9
        async with asyncio.timeout(30):
            while len(output) < 2:
                await asyncio.sleep(0.001)
        assert output == [
            "the private valkey-server 9.1.2 ended (SIGKILL); starting it again",
            "the private valkey-server 9.1.2 is back, with the jobs of its file",
        ]
        assert server.num_starts == 2
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


async def test_a_server_that_dies_again_and_again_ends_the_launcher_with_its_last_words() -> None:
    server = FakeServer()
    server.dies_at_once = True
    server.exit_code = 1
    with pytest.raises(GaveUp, match="died 6 times in a row: Bad file format") as gave_up:
        await RedisSupervisor(server, lambda _: None).supervise()
    assert gave_up.value.exit_code == 1
    assert server.num_starts == 1 + restarts.MAX_QUICK_DEATHS


def test_pauses_grow_and_a_long_life_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_BACKOFF_S", 0.2)
    deaths = RestartPolicy("it")
    assert [deaths.backoff_s(0.0) for _ in range(3)] == pytest.approx([0.2, 0.4, 0.8])
    assert deaths.backoff_s(restarts.HEALTHY_AFTER_S) == pytest.approx(0.2)
