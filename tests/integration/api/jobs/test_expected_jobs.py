"""A job's channel is subscribed to while its request is prepared, and left when there is no job."""

from __future__ import annotations

import httpx
import redis

from tests.support.running_service import MODEL, RunningService, wait_until


def num_channels(redis_url: str, service: RunningService) -> int:
    with redis.Redis.from_url(redis_url) as client:
        pattern = f"{service.settings.namespace}:*:ch:*"
        channels = client.pubsub_channels(pattern)
        assert isinstance(channels, list)
        return len(channels)


def num_subscribes(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        stats = client.info("commandstats")
        assert isinstance(stats, dict)
        return int(stats.get("cmdstat_subscribe", {"calls": 0})["calls"])


def test_a_refused_request_leaves_no_channel(
    client: httpx.Client, service: RunningService, redis_url: str
) -> None:
    before = num_subscribes(redis_url)
    unknown = {"model": "x/y", "prompt": "hi", "max_tokens": 4}
    assert client.post("/v1/completions", json=unknown).status_code == 404
    assert num_subscribes(redis_url) == before + 1
    wait_until(lambda: num_channels(redis_url, service) == 0, "the channel to be left")


def test_what_cannot_be_read_is_not_subscribed_to(client: httpx.Client, redis_url: str) -> None:
    before = num_subscribes(redis_url)
    unknown = {"model": MODEL, "prompt": "hi", "no_such_member": 4}
    assert client.post("/v1/completions", json=unknown).status_code == 400
    assert num_subscribes(redis_url) == before


def test_an_answer_has_one_subscription_for_each_of_its_jobs(
    client: httpx.Client, service: RunningService, redis_url: str
) -> None:
    for prompt, num_jobs in (("hi", 1), (["hi", "ho"], 2)):
        before = num_subscribes(redis_url)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert num_subscribes(redis_url) == before + num_jobs
    wait_until(lambda: num_channels(redis_url, service) == 0, "the channels to be left")
