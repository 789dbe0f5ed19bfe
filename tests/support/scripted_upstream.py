"""A stand-in for a vLLM server: its routes and events over a real socket, with faults to order.

Token i of an output is `token(prompt, i)`, whether the tokens before it are output or prompt: so a
continued request has the tokens of an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from shared.text.base import Tokenizer

VOCAB = 200

Scripted = tuple[int, str | None]  # a token, and why the output ends with it


def token(known: list[int]) -> int:
    """Returns the token after these: of no special kind, and different at each length."""
    return 30 + (sum(known) * 31 + len(known)) % VOCAB


def continued(prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the output of a prompt."""
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(token(known))
    return known[len(prompt) :]


@dataclass
class Faults:
    """What goes wrong; a test sets it at any time."""

    status: int = 200  # of requests
    cut_after: int | None = None  # tokens, then the connection closes
    abort_after: int | None = (
        None  # tokens, then the server ends the output as vLLM does at its stop
    )
    is_stuck: bool = False  # no token comes while this is so
    is_healthy: bool = True  # to /health
    poison: int | None = None  # a prompt with this token ends the engine, and all that runs in it
    token_s: float = 0.0  # between tokens
    output: list[int] | None = None  # of every request, from its first token
    num_cut: int = 0  # so far


class ScriptedUpstream:
    """`with ScriptedUpstream(tokenizer) as upstream:` listens at `upstream.url`."""

    def __init__(
        self, tokenizer: Tokenizer, *, model: str = "there", key: str = "", port: int = 0
    ) -> None:
        self.faults = Faults()
        self.bodies: list[dict[str, Any]] = []  # of the requests, in order
        self.num_beside: list[int] = []  # requests that ran at each end of the engine
        self._num_running = self._life = 0
        self.num_cached = 0  # tokens of each prompt, as it reports
        self._tokenizer, self._model, self._key = tokenizer, model, key
        config = uvicorn.Config(
            Starlette(routes=self._routes()), port=port, lifespan="off", log_level="critical"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> ScriptedUpstream:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.force_exit = self._server.should_exit = True
        self._thread.join(30)

    def _refusal(self, request: Request) -> Response | None:
        if self._key and request.headers.get("authorization") != f"Bearer {self._key}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        return None

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.faults.is_healthy else 503)

    async def _models(self, request: Request) -> Response:
        entry = {"id": self._model, "max_model_len": 512}
        return self._refusal(request) or JSONResponse({"data": [entry]})

    async def _tokenize(self, request: Request) -> Response:
        text = (await request.json())["prompt"]
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return self._refusal(request) or JSONResponse({"tokens": tokens})

    async def _generate(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        prompt, max_tokens = self._read(body)
        if self.faults.poison in prompt:
            await asyncio.sleep(3 * self.faults.token_s)
            self.num_beside.append(self._num_running)
            self._life += 1
            return JSONResponse({"error": {"message": "as told"}}, status_code=500)
        if self.faults.status != 200:
            return JSONResponse({"error": {"message": "as told"}}, status_code=self.faults.status)
        tokens = self._counted(self._tokens(prompt, max_tokens, self._life))
        return StreamingResponse(self._events(body, tokens), media_type="text/event-stream")

    async def _counted(self, tokens: AsyncIterator[Scripted]) -> AsyncIterator[Scripted]:
        self._num_running += 1
        try:
            async for each in tokens:
                yield each
        finally:
            self._num_running -= 1

    async def _tokens(
        self, prompt: list[int], max_tokens: int, life: int
    ) -> AsyncIterator[Scripted]:
        known = list(prompt)
        for number in range(1, max_tokens + 1):
            while self.faults.is_stuck:
                await asyncio.sleep(0.01)
            if life != self._life:
                raise ConnectionResetError("as told")
            if self.faults.cut_after is not None and number > self.faults.cut_after:
                self.faults.num_cut += 1
                raise ConnectionResetError("as told")
            output = self.faults.output
            known.append(token(known) if output is None else output[number - 1])
            reason = "length" if number == max_tokens else None
            if number == self.faults.abort_after:
                self.faults.abort_after, reason = None, "abort"
            yield known[-1], reason
            await asyncio.sleep(self.faults.token_s)
            if reason is not None:
                return

    # The wire of vLLM's server; a subclass has another.

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/version", lambda _: JSONResponse({"version": "0.0-scripted"})),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", self._generate, methods=["POST"]),
        ]

    def _read(self, body: dict[str, Any]) -> tuple[list[int], int]:
        """Returns the prompt and the most tokens of a request."""
        return body["prompt"], body["max_tokens"]

    async def _events(
        self, body: dict[str, Any], tokens: AsyncIterator[Scripted]
    ) -> AsyncIterator[str]:
        async for token_id, reason in tokens:
            choice = {"token_ids": [token_id], "logprobs": None, "finish_reason": reason}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {"prompt_tokens_details": {"cached_tokens": self.num_cached}}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"
