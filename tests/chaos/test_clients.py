"""Clients leave, dawdle, come back again and again."""

from __future__ import annotations

import asyncio

import httpx
from openai import AsyncOpenAI

from tests.chaos.harness.clients import Client, SlowClient
from tests.chaos.harness.expected import random_prompt
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until

MAX_GROWTH_BYTES = 24 * 2**20


async def test_a_client_that_leaves_before_the_first_token_ends_the_prefill(
    scenario: Scenario,
) -> None:
    # A prompt of 300 tokens takes 38 steps of 300 ms.
    await scenario.deployment.use_workers(
        1, MAX_NUM_BATCHED_TOKENS=8, ECHO_STEP_MS=300, MAX_NUM_SEQS=2
    )
    prompt = random_prompt(scenario.rng, 300)
    streamed = scenario.client(20, prompt=prompt)
    await until(lambda: streamed.reading.job_id, "the stream to be open")
    whole = scenario.client(20, prompt=prompt, stream=False)
    await scenario.num_live(2)
    queued = scenario.client(20, prompt=prompt)
    job_ids = await scenario.num_live(3)
    for client in (streamed, whole, queued):
        await client.close()
    await scenario.all_are(job_ids, state="cancelled", reason="disconnected", n="0")
    await scenario.settled()


async def test_a_slow_reader_delays_no_other_and_costs_bounded_memory(scenario: Scenario) -> None:
    frontend = scenario.deployment.frontends[0]
    await scenario.all_finished([scenario.client(20, first_url=0) for _ in range(20)])
    before = frontend.rss_bytes()
    prompt = random_prompt(scenario.rng)
    slow = SlowClient("127.0.0.1", int(frontend.settings["PORT"]), prompt, 450).start()
    fast = [scenario.client(250, first_url=0) for _ in range(20)]
    await scenario.all_finished(fast)
    assert slow.is_reading
    assert frontend.rss_bytes() - before < MAX_GROWTH_BYTES
    slow.bytes_per_s = 1e9
    reading = await slow.ended()
    expected = scenario.echo.of(prompt, 450)
    assert (reading.text, tuple(reading.token_ids)) == (expected.text, expected.token_ids)
    assert len(reading.ends) == 1
    await scenario.settled()


async def test_clients_that_drop_and_resume_again_and_again_read_each_token_once(
    scenario: Scenario,
) -> None:
    async def read_in_pieces(number: int) -> Client:
        prompt = random_prompt(scenario.rng)
        job_id = await scenario.submit(prompt, 150)
        reader = scenario.reader_of(job_id, prompt, 150)
        for at in range(5, 120, 10 + number):
            await reader.tokens(at)
            await reader.close()
            reader.start()
        return reader

    readers = await asyncio.gather(*(read_in_pieces(number) for number in range(6)))
    await scenario.all_finished(readers)
    await scenario.settled()


async def test_an_openai_stream_whose_worker_is_killed_is_one_whole_answer(
    scenario: Scenario,
) -> None:
    client = AsyncOpenAI(
        base_url=f"{scenario.deployment.urls()[0]}/v1", api_key="none", max_retries=0
    )
    prompt = random_prompt(scenario.rng)
    scenario.deployment.throttle.apply(10)
    stream = await client.completions.create(
        model=scenario.deployment.model, prompt=prompt, max_tokens=150, stream=True
    )
    texts: list[str] = []
    finishes: list[str] = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if chunk.choices[0].finish_reason:
            finishes.append(chunk.choices[0].finish_reason)
        if len(texts) == 5:
            job_id = chunk.id.removeprefix("cmpl-")
            (await scenario.worker_of(job_id)).kill()
            scenario.deployment.throttle.release()
    await client.close()
    assert "".join(texts) == scenario.echo.of(prompt, 150).text
    assert finishes == ["length"]
    assert (await scenario.job(job_id))["attempt"] == "2"
    await scenario.settled()


async def test_a_finished_job_read_to_its_end_has_nothing_more_to_tell(scenario: Scenario) -> None:
    client = scenario.client(20, on_disconnect="continue")
    await scenario.all_finished([client])
    job_id = client.reading.job_id
    async with httpx.AsyncClient() as http:
        for url in scenario.deployment.urls():
            answer = await http.get(
                f"{url}/v1/jobs/{job_id}/stream", headers={"Last-Event-ID": "21-0"}
            )
            assert answer.status_code == 204
    await scenario.settled()
