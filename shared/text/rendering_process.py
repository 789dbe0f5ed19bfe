"""`python -m shared.text.rendering_process`: renders chat templates where it may be killed.

It reads requests from the socket that is its standard input and answers each with one reply. It
bounds its address space, and the processor time of each request; a template that passes the
second bound ends the process by a signal. It ends when the other side closes the socket.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
import time
from datetime import datetime
from pathlib import Path

import msgspec

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.compiled_template import CompiledChatTemplate
from shared.text.rendering import RenderReply, RenderRequest, receive, send
from shared.text.sandbox import MAX_CPU_SECONDS

MAX_MEMORY_BYTES = 384 * 2**20  # of address space, beyond that at the process's start
# The sandbox's own bound gives the better error, if a template's loops notice it.
KILL_CPU_SECONDS = MAX_CPU_SECONDS + 0.5  # of one request


def serve(connection: socket.socket) -> None:
    """Answers requests until the other side closes the connection."""
    templates: dict[int, CompiledChatTemplate] = {}
    clock = _Clock()
    while (data := receive(connection)) is not None:
        begun_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, KILL_CPU_SECONDS)
        try:
            reply = _reply(msgspec.json.decode(data, type=RenderRequest), templates, clock)
            reply.cpu_s = time.process_time() - begun_s
            answer = msgspec.json.encode(reply)
        except MemoryError:
            cpu_s = time.process_time() - begun_s
            answer = msgspec.json.encode(RenderReply(out_of_memory=True, cpu_s=cpu_s))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


class _Clock:
    """The time of the request: the frontend's clock, not this process's."""

    now_iso = ""

    def now(self) -> datetime:
        return datetime.fromisoformat(self.now_iso) if self.now_iso else datetime.now()


def _reply(
    request: RenderRequest, templates: dict[int, CompiledChatTemplate], clock: _Clock
) -> RenderReply:
    clock.now_iso = request.now
    try:
        if request.template is not None:
            templates[request.number] = CompiledChatTemplate(request.template, clock.now)
        template = templates[request.number]
        if request.messages is None:
            return RenderReply(variables=sorted(template.variables))
        return RenderReply(text=template.render(request, request.messages))
    except InvalidParameter as error:
        return RenderReply(param=error.param, error=_printable(error.message), code=error.code)
    except TextInvalid as error:
        return RenderReply(error=_printable(str(error)))


def _printable(message: str) -> str:
    """Returns it as UTF-8 can carry it: a template may raise half a surrogate pair."""
    return message.encode(errors="replace").decode()


def _bound_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        pages = 0
    limit = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would have prompts in it


def main() -> int:
    _bound_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group
    serve(socket.socket(fileno=sys.stdin.fileno()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
