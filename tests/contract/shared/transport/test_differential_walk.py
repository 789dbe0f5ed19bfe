"""A seeded random walk through all transitions: every server and the stand-in behave alike.

The stand-in is compared with every server that is found: those on PATH and the wheel's.
PENSTOCK_WALK_STEPS=N walks N steps, PENSTOCK_WALK_SEED=S from that seed. A failure says both.
"""

from __future__ import annotations

import contextlib
import os
import random
import uuid
from pathlib import Path

import pytest

from shared import prefixes
from tests.contract.shared.transport.targets import open_target, private_server_of, real_servers
from tests.contract.shared.transport.walk import Walk
from tests.contract.shared.transport.weights import WEIGHTS

STEPS = os.environ.get("PENSTOCK_WALK_STEPS")
NUM_STEPS = int(STEPS or 1600)
SEED = os.environ.get("PENSTOCK_WALK_SEED")
CHECK_EVERY = 50

# What a walk of the default length has seen: else it no longer walks everywhere.
SEEN = {
    *WEIGHTS,
    "append: diverged",
    "append: ended",
    "append: fenced",
    "append: gap",
    "append: ok",
    "append: rejected",
    "claimed",
    "given back",
    "key taken: False",
    "key taken: True",
    "late claim: OK",
    "late claim: TAKEN",
    "overtook",
    "placed: any",
    "placed: prefix",
    "resumed",
}


@pytest.mark.timeout(0 if STEPS else 600)
async def test_all_servers_answer_alike_and_their_counters_are_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "PREFIX_STEP", 1)  # prompts have six tokens at most
    servers = real_servers()
    assert servers, "no server was found: neither on PATH nor in the wheel"
    seed = int(SEED) if SEED else random.randrange(10**6)
    async with contextlib.AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(open_target("fake", f"fake://{uuid.uuid4().hex}"))
        ]
        for path, version in servers:
            url = stack.enter_context(private_server_of(path, version))
            name = f"{Path(path).name} {'.'.join(map(str, version))}"
            targets.append(await stack.enter_async_context(open_target(name, url)))
        walk = Walk(targets, seed)
        await walk.run(NUM_STEPS, CHECK_EVERY)
    print(f"\nseed {seed}, {NUM_STEPS} steps on {[target.name for target in targets]}")
    print(sorted(walk.done.items()))
    print(sorted(walk.ledger.endings.items()))
    if NUM_STEPS >= 1000:
        assert set(walk.done) >= SEEN, f"seed {seed}: {SEEN - set(walk.done)} did not happen"
