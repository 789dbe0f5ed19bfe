"""Reads event streams as fast as one task can: for benches that must not measure their client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class Read:
    """One response: its `data:` lines, its length, and its last bytes."""

    num_chunks: int = 0
    num_bytes: int = 0
    tail: bytes = field(default=b"", repr=False)


TAIL_BYTES = 4096


async def read_stream(port: int, method: str, path: str, body: bytes = b"") -> Read:
    """One request to this machine over a connection of its own, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    read = Read()
    while data := await reader.read(1 << 18):
        read.num_chunks += data.count(b"data:")
        read.num_bytes += len(data)
        read.tail = (read.tail + data)[-TAIL_BYTES:]
    writer.close()
    return read
