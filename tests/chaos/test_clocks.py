"""The clock of the server is set while real frontends and workers run."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until
from tests.support.settable_clock import SettableClock

HOUR_S = 3600
A_WHILE_S = 2.0
THROTTLED_STEP_S = 0.1
# So many that no engine is done before the clock was set twice.
NUM_TOKENS = 400


@pytest.mark.clock
async def test_streams_go_on_when_the_servers_clock_is_set_and_a_worker_dies_then(
    tmp_path: Path, checkpoint: Path, echo: EchoText
) -> None:
    """An hour forward, two back, and at once after each a death."""
    clock = SettableClock(tmp_path / "clock")
    with clock.governs():
        deployment = Deployment(tmp_path, checkpoint)
    try:
        await deployment.heal()
        async with deployment.transport() as transport, contextlib.AsyncExitStack() as closing:
            scenario = Scenario(deployment, transport, echo)
            await scenario.oracle.begin()
            closing.push_async_callback(scenario.close)
            running = scenario.clients(8, NUM_TOKENS)
            async with scenario.middle_of(running, 3, step_s=THROTTLED_STEP_S):
                waiting = scenario.clients(40, 20)
                await until(lambda: all(c.reading.status == 200 for c in waiting), "acceptance")
                for offset_s in (HOUR_S, -HOUR_S):
                    clock.set(offset_s)
                    deployment.workers.pop(0).close()  # kill -9
                    await asyncio.sleep(A_WHILE_S)
                    await deployment.start_worker().ready()
                    seen = min(client.reading.num_tokens for client in running)
                    for client in running:
                        await client.tokens(seen + 5)
            await scenario.all_finished([*running, *waiting])
            await scenario.settled()
    finally:
        deployment.close()
