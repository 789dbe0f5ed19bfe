"""Several answers to one prompt, and several prompts in one request, whose worker is killed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.chaos.harness.scenario import Scenario

PROMPTS = [[11, 50, 200, 33, 7, 90, 91, 92], [120, 7, 300, 301, 302, 44]]
SAMPLED: dict[str, Any] = {
    "n": 3,
    "max_tokens": 120,
    "temperature": 0.9,
    "top_p": 0.95,
    "frequency_penalty": 0.3,
    "seed": 7,
    "logprobs": 1,
    "extra_body": {"ignore_eos": True, "return_token_ids": True, "min_tokens": 40},
}


class Answer:
    """What a stream sent of one index."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprob_tokens: list[str] = []
        self.ends: list[tuple[str, object]] = []

    def take(self, choice: Any) -> None:
        assert not self.ends, "it went on after its end"
        self.text += choice.text
        self.token_ids += choice.token_ids
        if choice.logprobs is not None:
            self.logprob_tokens += choice.logprobs.tokens
        if choice.finish_reason is not None:
            self.ends.append((choice.finish_reason, getattr(choice, "stop_reason", None)))


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_the_sdk_reads_whole_answers_of_every_choice_while_their_worker_is_killed(
    scenario: Scenario, num_prompts: int
) -> None:
    await scenario.deployment.use_workers(
        RUNNER="model", DTYPE="float32", DEVICE="cpu", NUM_KV_BLOCKS=256
    )
    requested = SAMPLED | {
        "model": scenario.deployment.model,
        "prompt": PROMPTS[0] if num_prompts == 1 else PROMPTS,
    }
    async with AsyncOpenAI(
        base_url=f"{scenario.deployment.urls()[0]}/v1", api_key="none", max_retries=0
    ) as client:
        plain = await client.completions.create(**requested)
        # A string that appears late in one of the undisturbed answers.
        requested |= {"stop": plain.choices[1].text[-6:-3]}
        calm = await client.completions.create(**requested)
        assert calm.usage is not None
        answers: dict[int, Answer] = defaultdict(Answer)
        scenario.deployment.throttle.apply(12)
        usage, is_killed = None, False
        try:
            async for chunk in await client.completions.create(
                stream=True, stream_options={"include_usage": True}, **requested
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    answers[choice.index].take(choice)
                have_begun = len(answers) == 3 * num_prompts and all(
                    len(answer.token_ids) >= 4 for answer in answers.values()
                )
                if have_begun and not is_killed:
                    (await scenario.worker_of(chunk.id.removeprefix("cmpl-"))).kill()
                    scenario.deployment.throttle.release()
                    is_killed = True
        finally:
            scenario.deployment.throttle.release()
    assert is_killed
    for choice in calm.choices:
        answer = answers[choice.index]
        assert answer.token_ids == (choice.model_extra or {})["token_ids"]
        assert answer.text == choice.text
        stop = getattr(choice, "stop_reason", None)
        assert answer.ends == [(choice.finish_reason, stop)]
        assert choice.logprobs is not None
        assert answer.logprob_tokens == choice.logprobs.tokens
    assert usage is not None
    assert usage.completion_tokens == calm.usage.completion_tokens
    assert usage.prompt_tokens == calm.usage.prompt_tokens
    assert (await scenario.job(chunk.id.removeprefix("cmpl-")))["attempt"] == "2"
    await scenario.settled()
