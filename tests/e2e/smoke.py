"""Three concurrent streams through a running service, with their times.

    python tests/e2e/smoke.py                        starts a service of its own
    BASE_URL=http://127.0.0.1:8000 python tests/e2e/smoke.py

Exits non-zero when a stream is empty or does not end in [DONE]. The times are printed, not judged:
the machine may be busy.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.launched import Launched

MAX_TOKENS = 200
PROMPTS = ("What is Penstock?", "How do I cancel a job?", "What happens when a worker dies?")


@dataclass(frozen=True)
class Times:
    ttft_s: float
    total_s: float
    num_chunks: int
    text: str


def stream(base_url: str, model: str, prompt: str) -> Times:
    """One greedy chat stream of exactly MAX_TOKENS tokens."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": prompt}],
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    started = time.perf_counter()
    first: float | None = None
    texts: list[str] = []
    last = ""
    with urllib.request.urlopen(request, timeout=120) as answer:
        for raw in answer:
            line = raw.decode().rstrip("\n")
            if not line.startswith("data: "):
                continue
            last = line[6:]
            if last == "[DONE]":
                continue
            for choice in json.loads(last).get("choices", ()):
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    texts.append(text)
    if last != "[DONE]" or first is None:
        raise SystemExit(f"the stream for {prompt!r} was empty or did not end: {last!r}")
    return Times(first - started, time.perf_counter() - started, len(texts), "".join(texts))


def together(base_url: str, model: str, prompts: tuple[str, ...]) -> tuple[float, list[Times]]:
    """Wall time of all streams started at once, and each one's times."""
    results: list[Times | BaseException] = [RuntimeError("not run")] * len(prompts)

    def run(index: int) -> None:
        try:
            results[index] = stream(base_url, model, prompts[index])
        except BaseException as error:  # carried to the main thread
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - started
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return wall_s, [result for result in results if isinstance(result, Times)]


def smoke(base_url: str) -> None:
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    together(base_url, model, PROMPTS[:1])  # warm
    _, three = together(base_url, model, PROMPTS)
    print(f"model {model}, {MAX_TOKENS} tokens a stream")
    print("stream  ttft_ms  total_ms  chunks  text")
    for index, times in enumerate(three):
        print(
            f"{index:>6}  {times.ttft_s * 1e3:>7.1f}  {times.total_s * 1e3:>8.0f}  "
            f"{times.num_chunks:>6}  {times.text[:48]!r}"
        )
    one_s = statistics.median(together(base_url, model, PROMPTS[:1])[0] for _ in range(3))
    two_s = statistics.median(together(base_url, model, PROMPTS[:2])[0] for _ in range(3))
    print(f"one stream {one_s:.2f} s, two together {two_s:.2f} s: {two_s / one_s:.2f} times one")


def main() -> None:
    if base_url := os.environ.get("BASE_URL"):
        smoke(base_url.rstrip("/"))
        return
    with (
        tempfile.TemporaryDirectory() as directory,
        Launched(Path(directory), is_forked=False) as penstock,
    ):
        smoke(penstock.base_url)


if __name__ == "__main__":
    main()
