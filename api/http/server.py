"""The server: uvicorn with a graceful shutdown.

uvicorn stops listening at the first signal. DrainingServer keeps listening: it responds 503 to
new requests and to the readiness probe, lets open responses finish for a while, ends the others
with an event that has the offset to resume from, and then stops.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api.http.open_requests import OpenRequests
from api.http.uvicorn_compat import HttpProtocol, WebSocketProtocol
from api.settings import ApiSettings

log = logging.getLogger(__name__)

CUT_TIMEOUT_S = 5.0  # for the last events of responses that were cut
BACKLOG = 2048
KEEPALIVE_CONNECTION_S = 75  # of idle connections; longer than that of load balancers
GRACE_TICKS = 3  # of 0.1 s, in which a load balancer sees the readiness probe fail


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second ends at once."""

    def __init__(
        self, config: uvicorn.Config, open_requests: OpenRequests, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._open_requests = open_requests
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_draining = False
        self._cut_at_s: float | None = None
        self._is_cut = False
        self._ticks = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: sets flags for the next tick."""
        if self._is_draining:
            self.should_exit = True
        self._is_draining = True

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or (self._is_draining and self._has_drained())

    def _has_drained(self) -> bool:
        now_s = time.monotonic()
        if self._cut_at_s is None:
            self._open_requests.close("This frontend is shutting down. Try again.")
            self._cut_at_s = now_s + self._shutdown_timeout_s
            log.info(
                "draining: the frontend accepts no new requests",
                extra={"open_requests": len(self._open_requests)},
            )
        self._ticks += 1
        if not len(self._open_requests):
            return self._ticks > GRACE_TICKS
        if now_s < self._cut_at_s:
            return False
        if not self._is_cut:
            self._is_cut = True
            log.warning(
                "shutdown timeout expired; cutting open requests",
                extra={"open_requests": len(self._open_requests)},
            )
            self._open_requests.cut_all()
        return now_s > self._cut_at_s + CUT_TIMEOUT_S


def make_server(app: FastAPI, settings: ApiSettings) -> DrainingServer:
    """Returns a server for an app of `create_app`: `run` it, or `serve` on a running loop."""
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=partial(HttpProtocol, write_timeout_s=settings.write_timeout_s),  # type: ignore[arg-type]
        ws=partial(WebSocketProtocol, write_timeout_s=settings.write_timeout_s),  # type: ignore[arg-type]
        ws_max_size=settings.max_body_bytes,
        ws_per_message_deflate=False,  # a message is bounded as it is sent
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # neither the client's address nor the scheme is used
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEPALIVE_CONNECTION_S,
        timeout_graceful_shutdown=int(CUT_TIMEOUT_S),
    )
    return DrainingServer(config, app.state.open_requests, settings.shutdown_timeout_s)
