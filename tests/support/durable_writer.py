"""The write side of Durable Streams over a service's jobs: a stream is a job, an append a token.

A ScriptedWorker that starts nothing holds the jobs. Reads are the app's own, under its own route.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.messages import START, Cursor, Delta, FinishReason, JobState, Usage
from shared.transport.ports.queue import Append, AppendStatus, JobEnd
from shared.transport.wire import chain_hash
from tests.support.running_service import RunningService
from tests.support.scripted_worker import LEASE_MS

PREFIX = "/v1/stream/"
TOKEN = 5  # that every append is
BODY = {"prompt": "a", "max_tokens": 400, "on_disconnect": "continue", "stream": True}
TEXT = re.compile(r"text/plain(;.*)?", re.IGNORECASE)


@dataclass
class Stream:
    """A job that is written. `name` is its public id."""

    name: str
    job_id: str
    attempt: int
    end: Cursor = START
    chain: str = ""
    is_closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def headers(self) -> dict[str, str]:
        offset = f"{self.end.num_tokens:016d}_{self.end.num_bytes:016d}"
        closed = {"stream-closed": "true"} if self.is_closed else {}
        return {"stream-next-offset": offset, "content-type": "text/plain; charset=utf-8", **closed}


class DurableWriter:
    """An ASGI app: PUT and POST write, everything else is the service's, at the job's text."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self._streams: dict[str, Stream] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._service.app(scope, receive, send)
            return
        path, request = scope["path"], Request(scope, receive)
        if scope["method"] == "PUT":
            await (await self._put(path, request))(scope, receive, send)
        elif scope["method"] == "POST":
            await (await self._post(path, request))(scope, receive, send)
        else:
            stream = self._streams.get(path)
            inner = f"/v1/jobs/{stream.name if stream else 'none'}/text"
            scope = {**scope, "path": inner, "raw_path": inner.encode()}
            await self._service.app(scope, receive, send)

    async def _put(self, path: str, request: Request) -> Response:
        body = await request.body()
        if not TEXT.fullmatch(request.headers.get("content-type", "text/plain")):
            return Response("only text is written here", 415)
        if path in self._streams:
            return Response(status_code=200, headers=self._streams[path].headers)
        stream = self._streams[path] = await self._submitted()
        is_closed = request.headers.get("stream-closed") == "true"
        if body or is_closed:
            await self._append(stream, body.decode(), is_closed)
        headers = {**stream.headers, "location": f"{self._service.base_url}{path}"}
        return Response(status_code=201, headers=headers)

    async def _post(self, path: str, request: Request) -> Response:
        stream, body = self._streams.get(path), await request.body()
        is_closed = request.headers.get("stream-closed") == "true"
        if stream is None:
            return Response(status_code=404)
        if not body and not is_closed:
            return Response("nothing to append", 400)
        async with stream.lock:
            if not stream.is_closed:
                await self._append(stream, body.decode(), is_closed)
            elif body:
                return Response("closed", 409, stream.headers)
        return Response(status_code=204, headers=stream.headers)

    async def _submitted(self) -> Stream:
        worker = self._service.worker
        async with (
            httpx.AsyncClient(base_url=self._service.base_url, timeout=60) as client,
            client.stream("POST", "/generate", json=BODY) as answer,
        ):
            name = answer.headers["x-request-id"]
            job_id = (await client.get(f"/v1/jobs/{name}")).json()["job_id"]
            while job_id not in worker.jobs:
                await asyncio.sleep(0.005)
        return Stream(name, job_id, worker.jobs[job_id].delivery.attempt)

    async def _append(self, stream: Stream, text: str, is_closed: bool) -> None:
        start, tokens = stream.end, (TOKEN,) if text else ()
        end = Cursor(start.num_tokens + len(tokens), start.num_bytes + len(text.encode()))
        chain = chain_hash(stream.chain, tokens)
        ended = None
        if is_closed:
            usage = Usage(1, end.num_tokens)
            ended = JobEnd(JobState.FINISHED, FinishReason.STOP, usage, None)
        delta = Delta(start, end, tokens, text)
        append = Append(stream.job_id, stream.attempt, delta, stream.chain, chain, ended)
        worker, queue = self._service.worker, self._service.transport.queue
        (result,) = await queue.append(worker.worker_id, LEASE_MS, [append])
        assert result.status is AppendStatus.OK, result
        stream.end, stream.chain, stream.is_closed = end, chain, is_closed
        if is_closed:
            worker.jobs.pop(stream.job_id, None)
