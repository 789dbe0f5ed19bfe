"""What a frontend and its rendering processes send each other: templates, requests and replies.

A message is its length, then JSON. This module does not import jinja2.
"""

from __future__ import annotations

import signal
import socket
import struct
from typing import Any

import msgspec

MAX_CHARS = 8_000_000  # of the rendered prompt
END_OF_TIME = signal.SIGPROF  # ends a rendering process that passed its bound on processor time
_LENGTH = struct.Struct(">I")  # of the JSON after it, in bytes


class TemplateSource(msgspec.Struct):
    """What a template is compiled from. `number` names it between the two processes."""

    number: int
    source: dict[str, str]
    special_tokens: dict[str, str]
    max_chars: int


class RenderRequest(msgspec.Struct):
    """Compiles `template` if it is given, and renders `messages` if they are given.

    `name`: which of a checkpoint's templates renders them; "": by the request's tools.
    """

    number: int
    template: TemplateSource | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    extra: dict[str, Any] = {}
    name: str = ""
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
    cpu_s: float = 0.0  # that the request took


def send(connection: socket.socket, data: bytes) -> None:
    """Raises OSError; TimeoutError if the connection has a timeout."""
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> bytearray | None:
    """Returns one message; None at the end of the connection. Raises OSError as `send` does."""
    head = _read(connection, _LENGTH.size)
    return None if head is None else _read(connection, _LENGTH.unpack(head)[0])


def _read(connection: socket.socket, num_bytes: int) -> bytearray | None:
    data = bytearray(num_bytes)
    view, begin = memoryview(data), 0
    while begin < num_bytes:
        num_read = connection.recv_into(view[begin:])
        if num_read == 0:
            return None
        begin += num_read
    return data
