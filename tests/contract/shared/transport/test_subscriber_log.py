"""A subscriber that keeps trying does not keep talking."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.launcher.redis_server import PrivateServer
from shared.redis.connections import Connections
from shared.redis.pubsub import Subscriber
from tests.support.polling import until


async def test_an_absent_server_is_one_line_and_its_coming_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shared.redis.pubsub")
    server = PrivateServer(tmp_path / "data")
    connections = Connections(f"unix://{tmp_path}/data/redis.sock")
    subscriber = Subscriber(connections.new_pubsub)
    subscriber.start()

    async def has_tried_often() -> bool:
        return subscriber.reconnects >= 5

    async def is_heard() -> bool:
        return len(caplog.records) > 1

    try:
        await until(has_tried_often)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        server.start()
        await until(is_heard)
        _, back = caplog.records
        assert (back.levelname, back.getMessage()) == ("WARNING", "reconnected to pub/sub")
        assert back.outage_s > 0  # type: ignore[attr-defined]
    finally:
        await subscriber.aclose()
        await connections.aclose()
        server.stop()
