"""The write side of Durable Streams over a service's jobs: a stream is a job, an append a token.

A ScriptedWorker that starts nothing holds the jobs. Reads are the app's own, under its own route.
"""

from __future__ import annotations

import asyncio
import re

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.messages import FinishReason, JobState, Usage
from shared.transport.ports.queue import AppendStatus, Delivery, JobEnd
from tests.support.jobs import Stream
from tests.support.running_service import RunningService
from tests.support.scripted_worker import LEASE_MS

PREFIX = "/v1/stream/"
TOKEN = 5  # that every append is
BODY = {"prompt": "a", "max_tokens": 400, "on_disconnect": "continue", "stream": True}
TEXT = re.compile(r"text/plain(;.*)?", re.IGNORECASE)


class Written(Stream):
    """A job that is written. `name` is its public id."""

    def __init__(self, name: str, delivery: Delivery) -> None:
        super().__init__(delivery)
        self.name = name
        self.is_closed = False
        self.lock = asyncio.Lock()

    @property
    def headers(self) -> dict[str, str]:
        offset = f"{self.cursor.num_tokens:016d}_{self.cursor.num_bytes:016d}"
        closed = {"stream-closed": "true"} if self.is_closed else {}
        return {"stream-next-offset": offset, "content-type": "text/plain; charset=utf-8", **closed}


class DurableWriter:
    """An ASGI app: PUT and POST write, everything else is the service's, at the job's text."""

    def __init__(self, service: RunningService) -> None:
        self._service = service
        self._streams: dict[str, Written] = {}

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

    async def _submitted(self) -> Written:
        worker = self._service.worker
        async with (
            httpx.AsyncClient(base_url=self._service.base_url, timeout=60) as client,
            client.stream("POST", "/generate", json=BODY) as answer,
        ):
            name = answer.headers["x-request-id"]
            job_id = (await client.get(f"/v1/jobs/{name}")).json()["job_id"]
            while job_id not in worker.jobs:
                await asyncio.sleep(0.005)
        return Written(name, worker.jobs[job_id].delivery)

    async def _append(self, stream: Written, text: str, is_closed: bool) -> None:
        tokens = (TOKEN,) if text else ()
        usage = Usage(1, stream.cursor.num_tokens + len(tokens))
        end = JobEnd(JobState.FINISHED, FinishReason.STOP, usage) if is_closed else None
        append = stream.append(tokens, text, end)
        worker, queue = self._service.worker, self._service.transport.queue
        (result,) = await queue.append(worker.worker_id, LEASE_MS, [append])
        assert result.status is AppendStatus.OK, result
        stream.accept(append)
        stream.is_closed = is_closed
        if is_closed:
            worker.jobs.pop(stream.job_id, None)
