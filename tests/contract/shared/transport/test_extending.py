"""The trial of a Redis key in docs/EXTENDING.md: its lines are run as they are printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shared.keys import Keys
from shared.transport import scripts
from shared.transport.connect import RedisTransport
from tests.support.redis_server import assert_every_key_expires
from tests.support.transport_steps import Steps

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/EXTENDING.md"


def trial(name: str, language: str) -> str:
    """Returns the block of code behind the mark of that name."""
    block = rf"<!-- trial: {name} -->\n```{language}\n(.*?)```"
    (lines,) = re.findall(block, PAGE.read_text(), re.S)
    assert isinstance(lines, str)
    return lines


async def test_a_key_takes_a_name_and_a_transition_that_gives_it_a_life(
    transport: RedisTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keys, "note", None, raising=False)
    exec(compile(trial("key", "python"), f"{PAGE.name}: key", "exec"), {})
    include = "--@include lib/common.lua"
    common = (ROOT / "shared/transport/lua/lib/common.lua").read_text()
    source = trial("transition", "lua").replace(include, common)
    known = dict(scripts.load_sources())
    monkeypatch.setattr(scripts, "load_sources", lambda **_: {**known, "note": source})
    steps = Steps(transport)
    keys: Any = steps.keys
    made = scripts.Scripts(keys, 1000)
    job_id = (await steps.running()).job.job_id
    async with transport.connections.reaching(keys.note(job_id)) as client:
        assert await made.call(client, "note", job_id, "seen") == 1
        assert await made.call(client, "note", "0-nobody", "seen") == 0
    assert await steps.redis.get(keys.note(job_id)) == b"seen"
    left_ms = await steps.redis.pttl(keys.job(job_id))
    assert 0 < await steps.redis.pttl(keys.note(job_id)) <= left_ms + 1000
    await assert_every_key_expires(steps.redis, keys.namespace)
