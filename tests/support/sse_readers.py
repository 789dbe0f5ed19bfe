"""Two habits of reading an event stream: as the standard has it, and as many clients do it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any


def by_lines(reads: Iterable[bytes]) -> Iterator[str]:
    """Yields the data of each event, by the rules of the standard for lines and blank lines."""
    data: list[str] = []
    for line in b"".join(reads).decode().split("\n"):
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def payloads(stream: bytes | str | Iterable[str]) -> list[Any]:
    """Returns the JSON of each event of a stream, without [DONE]. It may be given as its lines."""
    if isinstance(stream, bytes):
        stream = stream.decode()
    if isinstance(stream, str):
        stream = stream.split("\n")  # and at no other character that may be a line end
    lines = (line.removeprefix("data:").lstrip() for line in stream if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]


class BlankLineReader:
    """Splits at blank lines; an event that begins with a colon is a comment to it, whole.

    `strips`: what a socket gave is stripped first, and a rest that is an event already is taken for
    one, as vLLM's and evalscope's benchmark clients do. They know events without names only.
    """

    def __init__(self, *, strips: bool) -> None:
        self._strips = strips
        self._rest = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def push(self, read: bytes) -> Iterator[str]:
        """Yields the data of each event that `read` completes."""
        text = self._decoder.decode(read)
        *whole, self._rest = (self._rest + (text.strip() if self._strips else text)).split("\n\n")
        if self._strips and _is_whole(self._rest):
            whole.append(self._rest)
            self._rest = ""
        for event in whole:
            if not event.startswith(":"):
                lines = event.split("\n")
                yield from (line[6:] for line in lines if line.startswith("data: "))


def by_blank_lines(reads: Iterable[bytes], *, strips: bool) -> Iterator[str]:
    """Yields the data of each event that a BlankLineReader finds in what a socket gave."""
    reader = BlankLineReader(strips=strips)
    for read in reads:
        yield from reader.push(read)


def _is_whole(event: str) -> bool:
    if not event.startswith("data: "):
        return False
    try:
        return event[6:] == "[DONE]" or bool(json.loads(event[6:]))
    except ValueError:
        return False
