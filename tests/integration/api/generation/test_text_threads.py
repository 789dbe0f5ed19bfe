"""Text threads and the processes beside them: what occupies or kills one ends no other request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from shared.text import served_text
from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service

LARGE = "ab " * 1_000_000
NUM_LARGE = 2
NUM_SMALL = 5
NUM_ASKING, NUM_KILLS = 8, 12


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


@pytest.fixture
def large_vocabulary(
    redis_url: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningService]:
    """A service that holds the tiny checkpoint's vocabulary for one of the largest."""
    monkeypatch.setattr(served_text, "MAX_LOCAL_BYTES", 100)
    with running_service(redis_url, new_namespace(), checkpoint) as service:
        yield service


def text_processes() -> list[int]:
    """Pids of this process's children that hold a vocabulary."""
    pids = []
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"shared.text.text_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(int(pid))
    return pids


def test_a_killed_text_process_ends_each_request_with_its_answer_or_a_503(
    large_vocabulary: RunningService,
) -> None:
    killed: set[int] = set()
    outcomes: Counter[str] = Counter()

    def ask(number: int) -> None:
        prompt = f"number {number} "
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        url = f"{large_vocabulary.base_url}/v1/completions"
        answer = httpx.post(url, json=body, timeout=60)
        if answer.status_code == 200:
            assert prompt.startswith(answer.json()["choices"][0]["text"])  # the worker echoes
            outcomes["answer"] += 1
            return
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "service_unavailable"
        assert float(answer.headers["retry-after"]) > 0
        outcomes["refusal"] += 1

    def keep_asking(first: int) -> None:
        number = first
        while len(killed) < NUM_KILLS:
            ask(number)
            number += NUM_ASKING

    with ThreadPoolExecutor(NUM_ASKING) as threads:
        asking = [threads.submit(keep_asking, first) for first in range(NUM_ASKING)]
        pause_s = 0.1
        while not all(each.done() for each in asking):
            for pid in text_processes():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(pause_s)  # some are killed while they load, others at work
            pause_s *= 1.2  # however slow this machine is, one of them gives an answer
        for each in asking:
            each.result()
    print(f"{outcomes}, {len(killed)} kills")
    assert outcomes["answer"] > 0
    ask(0)
    assert len(text_processes()) == 1
