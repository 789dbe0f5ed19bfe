"""A real (tiny) model: a job that moves to another worker says what it would have said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shared.text.grammar import json_schema_grammar, regex_grammar
from tests.chaos.harness.clients import Client
from tests.chaos.harness.reading import Reading
from tests.chaos.harness.scenario import Scenario

PROMPTS = ([11, 50, 200, 33], [90, 91, 92], [120, 7, 300, 301, 302], [44, 45])
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    {"temperature": 0.7, "seed": 8, "rep_penalty": 1.3},
    {"temperature": 1.0, "seed": 9, "min_tokens": 200, "top_k": 50},
)
MAX_TOKENS = 300


def _requests(scenario: Scenario, stops: list[str]) -> list[Client]:
    clients = []
    for prompt, sampling, stop in zip(PROMPTS, SAMPLINGS, stops, strict=True):
        more = {"stop": stop} if stop else {"ignore_eos": True}
        clients.append(scenario.client(MAX_TOKENS, prompt=list(prompt), **sampling, **more))
    return clients


async def _whole(clients: list[Client]) -> list[Reading]:
    readings = [await client.ended() for client in clients]
    assert all(reading.finished for reading in readings), [r.ends or r.refusal for r in readings]
    return readings


async def test_sampling_penalties_and_stop_strings_go_on_as_if_nothing_had_happened(
    scenario: Scenario,
) -> None:
    await scenario.deployment.use_workers(
        RUNNER="model", DTYPE="float32", DEVICE="cpu", NUM_KV_BLOCKS=256
    )
    plain = await _whole(_requests(scenario, [""] * 4))
    # Strings that appear late in the undisturbed answers, for half of the jobs.
    stops = [_late_piece(plain[0].text), "", _late_piece(plain[2].text), ""]
    undisturbed = await _whole(_requests(scenario, stops))
    clients = _requests(scenario, stops)
    async with scenario.middle_of(clients, 15):
        (await scenario.worker_of(clients[0].reading.job_id)).kill()
    moved = await _whole(clients)
    for before, after in zip(undisturbed, moved, strict=True):
        assert after.token_ids == before.token_ids
        assert after.text == before.text
        for member in ("finish_reason", "stop_reason"):
            assert after.ends[0][member] == before.ends[0][member]
        usage = [reading.ends[0]["usage"] for reading in (before, after)]
        assert usage[0]["completion_tokens"] == usage[1]["completion_tokens"]
        assert usage[0]["prompt_tokens"] == usage[1]["prompt_tokens"]
    assert {(await scenario.job(c.reading.job_id))["attempt"] for c in clients} & {"2"}
    await scenario.settled()


ROWS = {"type": "array", "items": {"enum": ["up", "down", 7, None]}, "minItems": 60, "maxItems": 90}
REGEX = "([a-f]{4}-){30}"
GRAMMARS = (json_schema_grammar(ROWS, "schema"), regex_grammar(REGEX, "regex"))


@pytest.mark.promise(
    "Grammars: the output is the same after preemption, in any batch, and continued by another "
    "worker after any token"
)
async def test_structured_answers_move_and_stay_in_their_grammars(scenario: Scenario) -> None:
    await scenario.deployment.use_workers(
        RUNNER="model", DTYPE="float32", DEVICE="cpu", NUM_KV_BLOCKS=256
    )
    undisturbed = await _whole(await _structured(scenario))
    clients = await _structured(scenario)
    async with scenario.middle_of(clients, 15):
        (await scenario.worker_of(clients[0].reading.job_id)).kill()
    moved = await _whole(clients)
    for before, after in zip(undisturbed, moved, strict=True):
        assert (after.token_ids, after.text) == (before.token_ids, before.text)
        assert after.ends[0]["finish_reason"] == before.ends[0]["finish_reason"]
    assert moved[0].text.startswith("[")
    assert re.fullmatch(REGEX, moved[1].text)
    assert {(await scenario.job(c.reading.job_id))["attempt"] for c in clients} & {"2"}
    await scenario.settled()


async def _structured(scenario: Scenario) -> list[Client]:
    clients = []
    for prompt, grammar in zip(PROMPTS, GRAMMARS, strict=False):
        job_id = await scenario.submit(prompt, 400, seed=3, temperature=1.0, grammar=grammar)
        clients.append(scenario.reader_of(job_id, prompt, 400))
    return clients


def _late_piece(text: str) -> str:
    """Some plain characters that come for the first time in the second half."""
    for begin in range(len(text) // 2, len(text) - 3):
        piece = text[begin : begin + 3]
        if piece.isascii() and piece.isprintable() and text.index(piece) == begin:
            return piece
    raise AssertionError("the answer repeats itself too much")
