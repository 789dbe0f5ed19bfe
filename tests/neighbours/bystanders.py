"""Bystanders: clients of every streaming dialect that measure what they notice of others.

Each reads one stream after the other. Its text must be exact, its end its own; the time to its
first token and its worst gap between two tokens are kept for comparison with a calm run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from api.ids import parse_job_id
from tests.support.job_history import CANCEL, END, GET, SUBMIT, HistoryWriter

TEXT = "A gate and a wheel and water that turns it"
MESSAGES = [{"role": "user", "content": TEXT}]
NUM_TOKENS = 48  # at most; the echo runner gives all of them
TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.5

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"prompt": TEXT, "max_tokens": NUM_TOKENS}),
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": NUM_TOKENS}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": NUM_TOKENS}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": NUM_TOKENS}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": NUM_TOKENS}),
}


@dataclass
class Notice:
    """What bystanders noticed during one period. Times are seconds."""

    first_token_s: list[float] = field(default_factory=list)
    worst_gap_s: list[float] = field(default_factory=list)  # one of each stream
    health_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def figures(values: Sequence[float]) -> str:
            if not values:
                return "none"
            return f"p50 {statistics.median(values):.3f} max {max(values):.3f}"

        return (
            f"{len(self.worst_gap_s)} streams, first token {figures(self.first_token_s)} s, "
            f"worst gap {figures(self.worst_gap_s)} s, /health {figures(self.health_s)} s, "
            f"{len(self.faults)} faults"
        )


class Bystanders:
    """One client of each dialect against one frontend, one that cancels, one that watches /health.

    All ask at temperature 0, so that an answer is the same whichever requests are served beside it.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        model: str,
        history: HistoryWriter,
        expected: dict[str, tuple[str, str]],
    ) -> None:
        """`expected` has each dialect's text and finish reason; an empty one is filled on entry."""
        self.notice = Notice()
        self._model = model
        self._history = history
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),
        )
        self._expected = expected
        self._is_over = False

    async def __aenter__(self) -> Bystanders:
        if not self._expected:
            streams = await asyncio.gather(*map(self._stream, REQUESTS))
            for dialect, stream in zip(REQUESTS, streams, strict=True):
                self._expected[dialect] = stream[:2]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Notice]:
        """Reads streams until the block is left, and those that run then to their ends."""
        self.notice, self._is_over = Notice(), False
        tasks = [asyncio.create_task(self._keep_reading(dialect)) for dialect in REQUESTS]
        tasks.append(asyncio.create_task(self._keep_looking()))
        tasks.append(asyncio.create_task(self._keep_cancelling()))
        try:
            yield self.notice
        finally:
            self._is_over = True
            await asyncio.gather(*tasks)

    async def _keep_reading(self, dialect: str) -> None:
        notice = self.notice
        while not self._is_over:
            try:
                text, end, first_token_s, gap_s = await self._stream(dialect)
            except (AssertionError, httpx.HTTPError) as error:
                notice.faults.append(f"{dialect}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)  # a refusal at once is no reason to ask in a tight loop
                continue
            if (text, end) != self._expected[dialect]:
                notice.faults.append(f"{dialect}: another answer, ended as {end}: {text!r}")
            notice.first_token_s.append(first_token_s)
            notice.worst_gap_s.append(gap_s)

    async def _keep_looking(self) -> None:
        while not self._is_over:
            begin_s = time.monotonic()
            answer = await self._http.get("/health")
            self.notice.health_s.append(time.monotonic() - begin_s)
            if answer.status_code != 200:
                self.notice.faults.append(f"/health: {answer.status_code}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _keep_cancelling(self) -> None:
        """Cancels background responses, queued or running, and looks at what they are then."""
        body = {"model": self._model, "input": TEXT, "max_output_tokens": 400, "background": True}
        pause_s = 0.0
        while not self._is_over:
            begin_s = time.monotonic()
            created = await self._http.post("/v1/responses", json=body)
            if created.status_code != 200:
                self.notice.faults.append(f"background: {created.status_code} {created.text[:200]}")
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            job_id = parse_job_id(created.json()["id"])
            assert job_id is not None
            self._history.record(job_id, SUBMIT, begin_s, status="accepted")
            await asyncio.sleep(pause_s)
            pause_s = (pause_s + 0.03) % 0.3  # in every state that it may be in
            begin_s = time.monotonic()
            job = (await self._http.delete(f"/v1/jobs/{job_id}")).json()
            state = job["status"]
            status = "won" if state == "cancelled" else "lost"
            self._history.record(job_id, CANCEL, begin_s, status=status, state=state)
            await self._look(job_id)
            if state not in ("cancelled", "finished"):
                self.notice.faults.append(f"{job_id} was not cancelled: {state}")

    async def _stream(self, dialect: str) -> tuple[str, str, float, float]:
        """Reads one stream to its end: text, finish reason, time to the first token, worst gap."""
        path, body = REQUESTS[dialect]
        if dialect != "generate":
            body = body | {"model": self._model}
        body = body | {"temperature": 0, "stream": True}
        begin_s = time.monotonic()
        last_s: float | None = None
        first_token_s = worst_gap_s = 0.0
        text, end, looked = "", "", False
        request = self._http.stream("POST", path, json=body)
        async with request as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {(await response.aread())[:300]!r}")
            job_id = parse_job_id(response.headers["x-request-id"])
            assert job_id is not None
            self._history.record(job_id, SUBMIT, begin_s, status="accepted")
            async for payload in _payloads(response):
                piece, end = text_and_end(dialect, payload)
                if piece:
                    now_s = time.monotonic()
                    if last_s is None:
                        first_token_s = now_s - begin_s
                    else:
                        worst_gap_s = max(worst_gap_s, now_s - last_s)
                    last_s, text = now_s, text + piece
                    if not looked:
                        looked = True
                        await self._look(job_id)
                        last_s = time.monotonic()  # the look's time is not the stream's
                if end:
                    break
        if end not in ("length", "stop"):
            raise AssertionError(f"{job_id} ended as {end or 'cut off'}")
        seen_s = time.monotonic()
        num_tokens = await self._look(job_id)
        self._history.record(job_id, END, seen_s, state="finished", num_tokens=num_tokens)
        return text, end, first_token_s, worst_gap_s

    async def _look(self, job_id: str) -> int:
        invoked_s = time.monotonic()
        answer = await self._http.get(f"/v1/jobs/{job_id}")
        job = answer.json() if answer.status_code == 200 else None
        num_tokens = job["usage"]["completion_tokens"] if job else 0
        self._history.record(
            job_id,
            GET,
            invoked_s,
            state=job["status"] if job else None,
            num_tokens=num_tokens,
        )
        return int(num_tokens)


async def _payloads(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    pending = ""
    async for piece in response.aiter_text():
        *lines, pending = (pending + piece).split("\n")
        for line in lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_and_end(dialect: str, payload: dict[str, Any]) -> tuple[str, str]:
    """Returns the text of one event and, of the last one, the finish reason or the error."""
    if error := payload.get("error"):
        return "", f"error {error}"
    if dialect == "generate":
        return payload["text"], payload.get("finish_reason") or ""
    if dialect in ("chat", "completions"):
        if not payload["choices"]:
            return "", ""
        (choice,) = payload["choices"]
        text = choice["text"] if dialect == "completions" else choice["delta"].get("content")
        return text or "", choice["finish_reason"] or ""
    if dialect == "responses":
        if payload["type"] in ("response.completed", "response.incomplete"):
            return "", "stop" if payload["type"] == "response.completed" else "length"
        is_failure = payload["type"] in ("response.failed", "error")
        is_text = payload["type"] == "response.output_text.delta"
        return payload["delta"] if is_text else "", str(payload) if is_failure else ""
    if payload["type"] == "message_delta":
        reason = payload["delta"]["stop_reason"]
        return "", {"max_tokens": "length", "end_turn": "stop"}.get(reason, reason)
    is_text = payload["type"] == "content_block_delta"
    return payload["delta"].get("text", "") if is_text else "", ""
