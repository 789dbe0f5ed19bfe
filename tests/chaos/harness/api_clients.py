"""Clients of the other APIs in a long round: chat, Messages, background responses, batches.

What each question is answered was learned in a calm time. An answer must be the same, whatever was
broken meanwhile; only what cannot be resumed may break off.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.chaos.harness.clients import RETRY_S, TIMEOUT, TRY_AGAIN, refusal_of

PATIENCE_S = 180.0
MAX_TOKENS = 30
BATCH_ROWS = 40
QUESTIONS = (
    "A gate and a wheel",
    "What turns the wheel when the river is low?",
    "Ein Tor, ein Rad, und Wasser: öffnen!",
    "水 turns 🌊 the wheel",
)
OVERLOADED = 529  # Anthropic's status for what is a 503 elsewhere
UNFINISHED = frozenset({"queued", "in_progress"})


class ApiClients:
    """Asks at any frontend, and again at another one where that is safe."""

    def __init__(
        self, urls: Callable[[], Sequence[str]], model: str, rng: random.Random, api_key: str
    ) -> None:
        self.refusals: Counter[str] = Counter()  # by status and code
        self._urls = urls
        self._model = model
        self._rng = rng
        self._expected: dict[str, dict[str, str]] = {"chat": {}, "message": {}, "response": {}}
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"},
            timeout=TIMEOUT,
            verify=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def learn(self) -> None:
        """Asks every question once in every dialect, before anything is broken."""
        for question in QUESTIONS:
            chat = await self._until_answered("POST", "/v1/chat/completions", self._chat(question))
            self._expected["chat"][question] = _chat_text(chat.json())
            message = await self._until_answered("POST", "/v1/messages", self._message(question))
            self._expected["message"][question] = _message_text(message.json())
            response = await self._until_answered("POST", "/v1/responses", self._response(question))
            self._expected["response"][question] = _response_text(response.json())

    async def aclose(self) -> None:
        await self._http.aclose()

    async def chat(self) -> str:
        """A whole answer, requested again under its idempotency key until it comes."""
        question = self._rng.choice(QUESTIONS)
        answer = await self._until_answered(
            "POST",
            "/v1/chat/completions",
            self._chat(question),
            headers={"idempotency-key": uuid.uuid4().hex},
        )
        _check(_chat_text(answer.json()), self._expected["chat"][question])
        return "chat with a key, finished"

    async def message(self) -> str:
        """A stream, which no other frontend goes on with."""
        question = self._rng.choice(QUESTIONS)
        expected = self._expected["message"][question]
        text, is_over = "", False
        try:
            async with self._http.stream(
                "POST", self._url() + "/v1/messages", json=self._message(question, stream=True)
            ) as response:
                if response.status_code in TRY_AGAIN | {OVERLOADED}:
                    self.refusals[refusal_of(response.status_code, await response.aread())] += 1
                    return "message, refused"
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    assert not is_over, f"{line} came after the end"
                    event = json.loads(line.removeprefix("data: "))
                    if event["type"] == "content_block_delta":
                        text += event["delta"]["text"]
                    elif event["type"] == "error":
                        _check(text, expected, is_whole=False)
                        return "message, broken off"
                    is_over = event["type"] == "message_stop"
        except httpx.TransportError:
            pass
        _check(text, expected, is_whole=is_over)
        return "message, finished" if is_over else "message, broken off"

    async def response(self) -> str:
        """A response in the background, read at any frontend until it has ended."""
        question = self._rng.choice(QUESTIONS)
        created = await self._until_answered(
            "POST",
            "/v1/responses",
            self._response(question, background=True),
            headers={"idempotency-key": uuid.uuid4().hex},
        )
        response = created.json()
        deadline_s = time.monotonic() + PATIENCE_S
        while response["status"] in UNFINISHED:
            assert time.monotonic() < deadline_s, f"{response['id']} is {response['status']}"
            await asyncio.sleep(RETRY_S)
            found = await self._until_answered(
                "GET", f"/v1/responses/{response['id']}", is_known=True
            )
            response = found.json()
        assert response["error"] is None, response
        _check(_response_text(response), self._expected["response"][question])
        return "response in the background, finished"

    async def batch(self) -> str:
        """A batch, each of whose rows is in its output once and right."""
        questions = [self._rng.choice(QUESTIONS) for _ in range(BATCH_ROWS)]
        lines = (
            {
                "custom_id": str(i),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": self._chat(question),
            }
            for i, question in enumerate(questions)
        )
        data = "\n".join(map(json.dumps, lines)).encode()
        upload = await self._until_answered(
            "POST", "/v1/files", files={"file": ("rows.jsonl", data)}, data={"purpose": "batch"}
        )
        job = {
            "input_file_id": upload.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = (await self._until_answered("POST", "/v1/batches", job)).json()
        deadline_s = time.monotonic() + PATIENCE_S
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < deadline_s, f"{batch['id']}: {batch['request_counts']}"
            await asyncio.sleep(5 * RETRY_S)
            path = f"/v1/batches/{batch['id']}"
            batch = (await self._until_answered("GET", path, is_known=True)).json()
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {
            "total": BATCH_ROWS,
            "completed": BATCH_ROWS,
            "failed": 0,
        }
        path = f"/v1/files/{batch['output_file_id']}/content"
        output = await self._until_answered("GET", path, is_known=True)
        rows = [json.loads(line) for line in output.text.splitlines()]
        assert sorted(int(row["custom_id"]) for row in rows) == list(range(BATCH_ROWS))
        for row in rows:
            text = _chat_text(row["response"]["body"])
            _check(text, self._expected["chat"][questions[int(row["custom_id"])]])
        return "batch, finished"

    async def _until_answered(
        self, method: str, path: str, body: Any = None, *, is_known: bool = False, **more: Any
    ) -> httpx.Response:
        """The first answer that is none of a frontend or a store that is away.

        `is_known`: what is asked for was accepted, so that a 404 is an answer, and a wrong one.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        seen: object = None
        while time.monotonic() < deadline_s:
            try:
                answer = await self._http.request(method, self._url() + path, json=body, **more)
                seen = f"{answer.status_code} {answer.text[:300]}"
                may_try_again = answer.status_code in TRY_AGAIN - ({404} if is_known else set())
                if answer.status_code != 200:
                    self.refusals[refusal_of(answer.status_code, answer.content)] += 1
                if not may_try_again:
                    assert answer.status_code == 200, f"{method} {path}: {seen}"
                    return answer
            except httpx.TransportError as error:
                seen = type(error).__name__
            await asyncio.sleep(RETRY_S)
        raise AssertionError(f"{method} {path}: no answer within {PATIENCE_S:g} s, last {seen}")

    def _url(self) -> str:
        return self._rng.choice(self._urls())

    def _chat(self, question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        common = {"model": self._model, "max_tokens": MAX_TOKENS, "temperature": 0}
        return {**common, "messages": messages, **more}

    _message = _chat

    def _response(self, question: str, **more: Any) -> dict[str, Any]:
        common = {"model": self._model, "max_output_tokens": MAX_TOKENS, "temperature": 0}
        return {**common, "input": question, **more}


def _check(text: str, expected: str, *, is_whole: bool = True) -> None:
    if is_whole:
        assert text == expected, f"another text: {text!r}, not {expected!r}"
    else:
        assert expected.startswith(text.rstrip("\ufffd")), f"{text!r} does not begin {expected!r}"


def _chat_text(body: dict[str, Any]) -> str:
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length", body
    return str(choice["message"]["content"])


def _message_text(body: dict[str, Any]) -> str:
    assert body["stop_reason"] == "max_tokens", body
    return "".join(block["text"] for block in body["content"])


def _response_text(body: dict[str, Any]) -> str:
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}, body
    return "".join(part["text"] for item in body["output"] for part in item["content"])
