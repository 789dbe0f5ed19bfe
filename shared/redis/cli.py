"""Sends commands to a Redis server, without redis-cli, also through sentinels.

    python -m shared.redis.cli <url> HGETALL 'penstock:{p0}:job:<id>'

Sends one command and prints its reply. Without a command: the deployment's counters, workers and
live jobs.
"""

# ruff: noqa: T201 - a command line tool

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from shared.keys import Keys
from shared.redis.connections import Connections
from shared.redis.url import ServerKind, UnsupportedUrl, kind_of, redacted

MAX_LIVE_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when the server refused or did not answer, 2 for a bad command
    line."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if words else 2
    url, command = words[0], words[1:]
    try:
        if kind_of(url) is ServerKind.FAKE:
            raise UnsupportedUrl("fake:// is in-process: no other process can connect to it.")
        # In a cluster the first argument that looks like a key selects the node.
        key = next((word for word in command[1:] if ":" in word), Keys().live)
        connections = Connections(url, key)
    except UnsupportedUrl as error:
        print(error, file=sys.stderr)
        return 2
    try:
        asyncio.run(_look(connections, [command] if command else _overview()))
    except redis.ResponseError as error:
        print(f"(error) {error}", file=sys.stderr)
        return 1
    except redis.RedisError as error:
        print(f"{redacted(url)} does not answer ({type(error).__name__})", file=sys.stderr)
        return 1
    return 0


async def _look(connections: Connections, commands: Sequence[Sequence[str]]) -> None:
    try:
        for command in commands:
            if len(commands) > 1:
                print(f"> {shlex.join(command)}")
            reply: Any = await connections.commands.execute_command(*command)  # type: ignore[no-untyped-call]
            for line in _lines(reply, _is_mapping(command)):
                print(line)
    finally:
        await connections.aclose()


def _overview() -> list[list[str]]:
    keys = Keys()
    return [
        ["HGETALL", keys.stat],
        ["HGETALL", keys.workers],
        ["ZRANGE", keys.live, "0", str(MAX_LIVE_SHOWN - 1)],
    ]


def _is_mapping(command: Sequence[str]) -> bool:
    return command[0].upper() in ("HGETALL", "CONFIG")


def _lines(reply: Any, is_mapping: bool, indent: str = "") -> Iterator[str]:
    if isinstance(reply, dict):
        reply = [part for pair in reply.items() for part in pair]
        is_mapping = True
    if isinstance(reply, list | tuple | set):
        items = list(reply)
        if not items:
            yield f"{indent}(empty)"
        elif is_mapping and len(items) % 2 == 0 and not any(map(_is_nested, items)):
            for name, value in zip(items[::2], items[1::2], strict=True):
                yield f"{indent}{_text(name)}: {_text(value)}"
        else:
            for number, item in enumerate(items, 1):
                if _is_nested(item):
                    yield f"{indent}{number})"
                    yield from _lines(item, False, indent + "   ")
                else:
                    yield f"{indent}{number}) {_text(item)}"
    else:
        yield indent + _text(reply)


def _is_nested(item: Any) -> bool:
    return isinstance(item, list | tuple | set | dict)


def _text(value: Any) -> str:
    if value is None:
        return "(nil)"
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    sys.exit(main())
