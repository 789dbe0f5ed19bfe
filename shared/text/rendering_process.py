"""`python -m shared.text.rendering_process`: renders chat templates where it may be killed.

It reads requests from the socket that is its standard input and answers each with one reply. It
bounds its address space, and the processor time of each request; a template that passes the
second bound ends the process by a signal. It ends when the other side closes the socket.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.compiled_template import CompiledChatTemplate
from shared.text.sandbox import MAX_CPU_SECONDS

LENGTH = struct.Struct(">I")  # of the JSON behind it, in bytes
MAX_MEMORY_BYTES = 384 * 2**20  # of address space, beyond what the process starts with
# The sandbox's own bound gives the better error, where a template's loops notice it.
KILL_CPU_SECONDS = MAX_CPU_SECONDS + 0.5  # of one request
END_OF_TIME = signal.SIGPROF


class TemplateSource(msgspec.Struct):
    """What a template is compiled from. `number` names it between the two processes."""

    number: int
    source: dict[str, str]
    special_tokens: dict[str, str]
    max_chars: int


class RenderRequest(msgspec.Struct):
    """Compiles `template` if it is given, and renders `messages` if they are given."""

    number: int
    template: TemplateSource | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    extra: dict[str, Any] = {}
    now: str = ""  # local time in ISO 8601


class RenderReply(msgspec.Struct, omit_defaults=True):
    """`text`, or an error: InvalidParameter with a `param`, else TextInvalid.

    `out_of_memory`: the process should not be used again.
    """

    text: str = ""
    variables: list[str] = []  # of the template that was compiled
    param: str | None = None
    error: str | None = None
    code: str | None = None
    out_of_memory: bool = False


def serve(connection: socket.socket) -> None:
    """Answers requests until the other side closes the connection."""
    templates: dict[int, CompiledChatTemplate] = {}
    clock = _Clock()
    while (data := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, KILL_CPU_SECONDS)
        try:
            reply = _reply(msgspec.json.decode(data, type=RenderRequest), templates, clock)
            answer = msgspec.json.encode(reply)
        except MemoryError:
            answer = msgspec.json.encode(RenderReply(out_of_memory=True))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def send(connection: socket.socket, data: bytes) -> None:
    """Raises OSError; TimeoutError where the connection has a timeout."""
    connection.sendall(LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray | None:
    """Returns one message; None at the end of the connection. Raises OSError as `send` does."""
    head = _read(connection, LENGTH.size)
    return None if head is None else _read(connection, LENGTH.unpack(head)[0])


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
        made = request.template
        if made is not None:
            templates[made.number] = CompiledChatTemplate(
                made.source, made.special_tokens, now=clock.now, max_chars=made.max_chars
            )
        template = templates[request.number]
        if request.messages is None:
            return RenderReply(variables=sorted(template.variables))
        text = template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            extra=request.extra,
        )
        return RenderReply(text=text)
    except InvalidParameter as error:
        return RenderReply(param=error.param, error=_printable(error.message), code=error.code)
    except TextInvalid as error:
        return RenderReply(error=_printable(str(error)))


def _printable(message: str) -> str:
    """Returns it as UTF-8 can carry it: a template may raise half a surrogate pair."""
    return message.encode(errors="replace").decode()


def _read(connection: socket.socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    view, begin = memoryview(data), 0
    while begin < num_bytes:
        num_read = connection.recv_into(view[begin:])
        if num_read == 0:
            return None
        begin += num_read
    return data


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
