"""A small request is answered while large texts occupy the other text threads."""

from __future__ import annotations

import threading
import time

import httpx

from tests.support.running_service import MODEL, RunningService

LARGE = "ab " * 1_000_000
NUM_LARGE = 2
NUM_SMALL = 5


def test_small_requests_do_not_wait_for_large_ones(service: RunningService) -> None:
    ended: list[int] = []

    def send_large() -> None:
        body = {"model": MODEL, "prompt": LARGE}
        ended.append(httpx.post(f"{service.base_url}/tokenize", json=body, timeout=120).status_code)

    threads = [threading.Thread(target=send_large) for _ in range(NUM_LARGE)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # until one is at it
    small = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(NUM_SMALL):
        answer = httpx.post(f"{service.base_url}/tokenize", json=small, timeout=120)
        assert answer.status_code == 200
    num_ended = len(ended)
    for thread in threads:
        thread.join()
    assert num_ended == 0, "small requests waited until a large one had ended"
    assert ended == [200] * NUM_LARGE
