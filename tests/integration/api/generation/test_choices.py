"""Several answers to a prompt and several prompts in a request, as the SDK and plain HTTP see them.

The worker is a process, its engine runs a tiny random model on the CPU.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import (
    frontend_of_workers,
    make_tiny_checkpoint,
    running_frontend,
    wait_until,
)
from tests.support.service_fixtures import openai_client
from tests.support.service_processes import MODEL
from tests.support.sse_readers import payloads
from tests.support.throttle import FAULTS, Throttle

PROMPT = "The keeper counts to sixty, and the water is still"
PROMPTS = ["The gate opens", "By noon the wind", "What happens in the night?"]
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SAMPLED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 20,
    "temperature": 1.0,
    "seed": 3,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture
def slow(throttle: Throttle) -> Iterator[None]:
    """Answers begin, and do not end while the test lasts."""
    throttle.apply(3)
    yield
    throttle.release()


@pytest.fixture(scope="module")
def namespace() -> str:
    return new_namespace()


@pytest.fixture(scope="module")
def base_url(
    redis_url: str,  # noqa: F811
    namespace: str,
    tmp_path_factory: pytest.TempPathFactory,
    throttle: Throttle,
) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("choices")
    settings = {
        "MODEL": str(make_tiny_checkpoint(directory)),
        "RUNNER": "model",
        "DEVICE": "cpu",
        "CPU_TIER": "reference",
        "DRAIN_TIMEOUT_S": "1",
        "PYTHONPATH": str(FAULTS),
        **throttle.env,
    }
    with frontend_of_workers(redis_url, namespace, directory, {MODEL: settings}) as frontend:
        yield frontend.base_url


client = openai_client


def texts_of(chunks: Iterable[Any]) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Each index's text and finish reasons."""
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            texts[choice.index] += (delta.content if delta else choice.text) or ""
            if choice.finish_reason is not None:
                ends[choice.index].append(choice.finish_reason)
    return dict(sorted(texts.items())), dict(sorted(ends.items()))


def test_three_completions_are_the_same_streamed_and_whole(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, n=3, **SAMPLED)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    assert len({choice.text for choice in whole.choices}) == 3
    assert whole.usage is not None
    alone = client.completions.create(prompt=PROMPT, **SAMPLED)
    assert alone.usage is not None
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    assert whole.usage.completion_tokens == 60
    assert whole.choices[0].text == alone.choices[0].text
    chunks = list(
        client.completions.create(
            prompt=PROMPT, n=3, stream=True, stream_options={"include_usage": True}, **SAMPLED
        )
    )
    texts, ends = texts_of(chunks)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == {0: ["length"], 1: ["length"], 2: ["length"]}
    *_, usage = chunks
    assert (usage.choices, usage.usage.completion_tokens) == ([], 60)
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens


def test_three_chat_answers_are_the_same_streamed_and_whole(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, n=3, **SAMPLED)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    answers = {choice.index: choice.message.content for choice in whole.choices}
    assert len(set(answers.values())) == 3
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES, n=3, stream=True, stream_options={"include_usage": True}, **SAMPLED
        )
    )
    texts, ends = texts_of(chunks)
    assert texts == answers
    assert ends == {0: ["length"], 1: ["length"], 2: ["length"]}
    roles = [
        choice.index
        for chunk in chunks
        for choice in chunk.choices
        if choice.delta.role == "assistant"
    ]
    assert sorted(roles) == [0, 1, 2]
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 60
    # The helper indexes its list of choices. Its final completion refuses those that were cut.
    with client.chat.completions.stream(messages=MESSAGES, n=3, **SAMPLED) as stream:
        snapshots = [stream.current_completion_snapshot for _ in stream]
    accumulated = snapshots[-1].choices
    assert {choice.index: choice.message.content for choice in accumulated} == answers


@pytest.mark.parametrize("prompt", [PROMPT, PROMPTS])
def test_there_is_one_done_and_nothing_after_it(base_url: str, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "n": 2, "stream": True, "max_tokens": 3}
    text = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).text
    assert text.count("data: [DONE]") == 1
    assert text.endswith("data: [DONE]\n\n")
    ids = {event["id"] for event in payloads(text)}
    assert len(ids) == 1


def test_stop_strings_and_log_probabilities_are_each_choices_own(client: OpenAI) -> None:
    whole = client.completions.create(
        prompt=PROMPT, n=4, logprobs=1, stop=["a", "e"], **(SAMPLED | {"max_tokens": 60})
    )
    chunks = client.completions.create(
        prompt=PROMPT,
        n=4,
        logprobs=1,
        stop=["a", "e"],
        stream=True,
        **(SAMPLED | {"max_tokens": 60}),
    )
    tokens: dict[int, list[str]] = defaultdict(list)
    texts: dict[int, str] = defaultdict(str)
    ends = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
            if choice.finish_reason:
                ends[choice.index] = (choice.finish_reason, getattr(choice, "stop_reason", None))
    assert "stop" in {reason for reason, _ in ends.values()}
    for choice in whole.choices:
        assert "a" not in choice.text
        assert "e" not in choice.text
        assert texts[choice.index] == choice.text
        stop = getattr(choice, "stop_reason", None)
        assert ends[choice.index] == (choice.finish_reason, stop)
        assert choice.finish_reason == ("length" if stop is None else "stop")
        assert choice.logprobs is not None
        assert tokens[choice.index] == choice.logprobs.tokens


def test_the_best_of_more_are_those_with_the_highest_mean_log_probability(client: OpenAI) -> None:
    every = client.completions.create(prompt=PROMPT, n=4, logprobs=0, **SAMPLED)
    means = {}
    for choice in every.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        means[choice.text] = sum(choice.logprobs.token_logprobs) / 20
    best = client.completions.create(prompt=PROMPT, n=2, best_of=4, **SAMPLED)
    assert [choice.text for choice in best.choices] == sorted(
        means, key=lambda text: means[text], reverse=True
    )[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert [choice.logprobs for choice in best.choices] == [None, None]
    assert best.usage is not None
    assert best.usage.completion_tokens == 80


def test_an_echo_goes_before_each_answer(client: OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPTS, n=2, **SAMPLED)
    echoed = client.completions.create(prompt=PROMPTS, n=2, echo=True, **SAMPLED)
    for index, (choice, whole) in enumerate(zip(plain.choices, echoed.choices, strict=True)):
        assert whole.text == PROMPTS[index // 2] + choice.text
    chunks = list(client.completions.create(prompt=PROMPTS, n=2, echo=True, stream=True, **SAMPLED))
    first = {}
    for chunk in chunks:
        for choice in chunk.choices:
            first.setdefault(choice.index, choice.text)
    assert first == {index: PROMPTS[index // 2] for index in range(6)}
    assert texts_of(chunks)[0] == {choice.index: choice.text for choice in echoed.choices}


def test_token_ids_are_echoed_as_their_text(client: OpenAI, base_url: str) -> None:
    body = {"model": MODEL, "prompt": "naïve 😀"}
    token_ids = httpx.post(f"{base_url}/tokenize", json=body).json()["tokens"]
    echoed = client.completions.create(prompt=token_ids, echo=True, **SAMPLED)
    assert echoed.choices[0].text.startswith("naïve 😀")


def test_each_prompt_of_a_list_is_answered_as_if_it_came_alone(
    client: OpenAI, base_url: str
) -> None:
    alone = [client.completions.create(prompt=prompt, n=2, **SAMPLED) for prompt in PROMPTS]
    wanted = [choice.text for answer in alone for choice in answer.choices]
    together = client.completions.create(prompt=PROMPTS, n=2, **SAMPLED)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == wanted
    assert together.usage is not None
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        total = sum(getattr(answer.usage, count) for answer in alone)
        assert getattr(together.usage, count) == total
    chunks = list(client.completions.create(prompt=PROMPTS, n=2, stream=True, **SAMPLED))
    texts, ends = texts_of(chunks)
    assert list(texts.values()) == wanted
    assert ends == {index: ["length"] for index in range(6)}
    for answer in (together, chunks[0]):
        job_ids = answer.job_ids  # type: ignore[union-attr]
        assert answer.id.removeprefix("cmpl-") == job_ids[0]
        for job_id in job_ids:
            job = httpx.get(f"{base_url}/v1/jobs/{job_id}").json()
            assert (job["status"], job["num_choices"]) == ("finished", 2)
    lists = [
        httpx.post(f"{base_url}/tokenize", json={"model": MODEL, "prompt": prompt}).json()["tokens"]
        for prompt in PROMPTS
    ]
    as_ids = client.completions.create(prompt=lists, n=2, **SAMPLED)
    assert [choice.text for choice in as_ids.choices] == wanted


def test_token_ids_are_shown_choice_by_choice(client: OpenAI) -> None:
    params = SAMPLED | {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole = client.completions.create(prompt=PROMPTS, n=2, **params)
    shown = [choice.model_extra or {} for choice in whole.choices]
    assert all(len(extra["token_ids"]) == 20 for extra in shown)
    prompts = [extra["prompt_token_ids"] for extra in shown]
    assert prompts[0] == prompts[1] != prompts[2]
    token_ids: dict[int, list[int]] = defaultdict(list)
    for chunk in client.completions.create(prompt=PROMPTS, n=2, stream=True, **params):
        for choice in chunk.choices:
            token_ids[choice.index] += (choice.model_extra or {})["token_ids"]
    assert [token_ids[index] for index in range(6)] == [extra["token_ids"] for extra in shown]


def test_chat_has_as_many_answers_as_one_job_may_have(base_url: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "n": 129}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


LONG = {"model": MODEL, "stream": True, "max_tokens": 400, "ignore_eos": True}


def is_idle(base_url: str) -> bool:
    """Nothing runs, and every block is free."""
    (worker,) = httpx.get(f"{base_url}/health").json()["workers"]
    is_free = worker["free_blocks"] == worker["total_blocks"]
    return is_free and worker["running"] == worker["waiting"] == worker["jobs"] == 0


def status_of(base_url: str, job_id: str) -> str:
    return str(httpx.get(f"{base_url}/v1/jobs/{job_id}").json()["status"])


def first_event(lines: Iterator[str]) -> Any:
    return json.loads(next(line for line in lines if line.startswith("data: {"))[6:])


@pytest.mark.usefixtures("slow")
def test_leaving_cancels_every_job_of_the_request(base_url: str) -> None:
    body = LONG | {"prompt": PROMPTS, "n": 2}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=60) as stream:
        job_ids = first_event(stream.iter_lines())["job_ids"]
    for job_id in job_ids:
        wait_until(lambda job_id=job_id: status_of(base_url, job_id) == "cancelled", "the end")
    wait_until(lambda: is_idle(base_url), "an idle worker")


@pytest.mark.usefixtures("slow")
def test_one_job_that_fails_ends_the_answer_and_the_others(base_url: str) -> None:
    body = LONG | {"prompt": PROMPTS}
    with httpx.stream("POST", f"{base_url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        job_ids = first_event(lines)["job_ids"]
        httpx.delete(f"{base_url}/v1/jobs/{job_ids[1]}")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2][6:])["error"]["code"] == "cancelled"
    for job_id in job_ids:
        wait_until(lambda job_id=job_id: status_of(base_url, job_id) == "cancelled", "the end")


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("streamed", [False, True])
def test_all_jobs_are_admitted_or_none(
    base_url: str,
    redis_url: str,  # noqa: F811
    namespace: str,
    streamed: bool,
) -> None:
    limits = {"max_queued_tokens": 12, "max_queue_share_per_tenant": 1}
    with running_frontend(redis_url, namespace, **limits) as strict:
        strict.until_ready()
        body = LONG | {"prompt": ["a", "b", PROMPT * 3], "stream": streamed}
        answer = httpx.post(f"{strict.base_url}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        # It is named by its first job, which was admitted and is no more.
        first = answer.headers["x-request-id"]
        assert status_of(strict.base_url, first) == "cancelled"
    wait_until(lambda: is_idle(base_url), "an idle worker")


def tail_events(text: str) -> list[tuple[str, Any]]:
    """(id, payload) of each event."""
    events, event_id = [], ""
    for line in text.splitlines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: {"):
            events.append((event_id, json.loads(line[6:])))
    return events


def received(events: Iterable[tuple[str, Any]]) -> dict[int, tuple[str, list[int], list[str]]]:
    found: dict[int, tuple[str, list[int], list[str]]] = {}
    for _, event in events:
        if "index" in event:
            text, token_ids, ends = found.get(event["index"], ("", [], []))
            ends = [*ends, *([event["finish_reason"]] if "finish_reason" in event else [])]
            found[event["index"]] = (text + event["text"], token_ids + event["token_ids"], ends)
    return found


def test_the_jobs_own_stream_has_its_choices_from_any_event_on(
    client: OpenAI, base_url: str
) -> None:
    whole = client.completions.create(prompt=PROMPT, n=3, **SAMPLED)
    url = f"{base_url}/v1/jobs/{whole.id}/stream"
    events = tail_events(httpx.get(url, timeout=60).text)
    assert {index: text for index, (text, _, _) in received(events).items()} == {
        choice.index: choice.text for choice in whole.choices
    }
    assert all(ends == ["length"] for _, _, ends in received(events).values())
    last = events[-1][1]
    assert (last["done"], last["finish_reason"]) == (True, "length")
    assert len({event_id for event_id, _ in events}) == len(events)
    for at, (event_id, _) in itertools.islice(enumerate(events), 0, len(events) - 1, 7):
        rest = httpx.get(url, headers={"Last-Event-ID": event_id}, timeout=60).text
        assert received(tail_events(rest)) == received(events[at + 1 :])


def test_a_reader_that_has_more_of_a_choice_gets_the_rest_of_each(
    client: OpenAI, base_url: str
) -> None:
    whole = client.completions.create(prompt=PROMPT, n=3, **SAMPLED)
    url = f"{base_url}/v1/jobs/{whole.id}/stream"
    events = tail_events(httpx.get(url, timeout=60).text)
    for at, upto in ((5, 12), (17, len(events) - 1)):
        had = [event for _, event in events[at + 1 : upto] if event["index"] == 1]
        num_tokens = sum(len(event["token_ids"]) for event in had)
        num_bytes = sum(len(event["text"].encode()) for event in had)
        end = "e" if any("finish_reason" in event for event in had) else ""
        point = f"{events[at][0]}.1-{num_tokens}-{num_bytes}{end}"
        rest = tail_events(httpx.get(url, params={"after": point}, timeout=60).text)
        lacked = [one for one in events[at + 1 : upto] if one[1]["index"] != 1]
        assert num_tokens
        assert [event for _, event in rest] == [event for _, event in lacked + events[upto:]]
        for again, (event_id, _) in enumerate(rest[:-1]):
            later = tail_events(httpx.get(url, params={"after": event_id}, timeout=60).text)
            assert later == rest[again + 1 :]


def test_an_error_before_the_answer_is_an_ordinary_one(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt=PROMPTS, **(SAMPLED | {"model": "nobody"}))
