"""The Lua transitions: loaded from their files, called by their hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from shared.keys import Keys
from shared.redis.pool import Command, Commands, Word

_INCLUDE = re.compile(r"^--@include (\S+)$", re.MULTILINE)
_BROADCAST = "local PUBLISH = 'PUBLISH'"
_SHARDED = "local PUBLISH = 'SPUBLISH'"

Argument = Word


def load_sources(*, is_sharded: bool = False) -> Mapping[str, str]:
    """Returns each transition's whole text by its name, with its includes in their places.

    `is_sharded`: frames go to sharded channels, as in a cluster.
    """
    folder = Path(__file__).parent / "lua"

    def include(match: re.Match[str]) -> str:
        return (folder / match[1]).read_text(encoding="utf-8")

    sources = {
        path.stem: _INCLUDE.sub(include, path.read_text(encoding="utf-8"))
        for path in folder.glob("*.lua")
    }
    if is_sharded:
        return {name: source.replace(_BROADCAST, _SHARDED) for name, source in sources.items()}
    return sources


class Scripts:
    """Calls transitions by EVALSHA, and by EVAL where the server forgot them.

    `retain_ms`: how long an ended job without the field (of an older release) is kept.
    """

    def __init__(self, keys: Keys, retain_ms: int, *, is_sharded: bool = False) -> None:
        # While a cluster moves a slot key by key, a script would find and write a part of its keys.
        # One that names a missing key is refused before it starts, with TRYAGAIN or ASK.
        named = (keys.live, keys.absent) if is_sharded else (keys.live,)
        self._first_words = (len(named), *named, keys.prefix, retain_ms)
        self._sources = load_sources(is_sharded=is_sharded)
        self._digests = {
            name: hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            for name, source in self._sources.items()
        }

    async def call(self, commands: Commands, name: str, *arguments: Argument) -> Any:
        """Returns the transition's reply, with byte strings as sent. Raises RedisError."""
        try:
            return await commands.execute_command(*self.command(name, *arguments))
        except NoScriptError:
            return await commands.execute_command(*self.text_command(name, *arguments))

    def command(self, name: str, *arguments: Argument) -> Command:
        """Returns the transition as one command; the reply may be NoScriptError."""
        return ("EVALSHA", self._digests[name], *self._words(arguments))

    def text_command(self, name: str, *arguments: Argument) -> Command:
        """Returns the command with the whole script, for a server that replied NoScriptError."""
        return ("EVAL", self._sources[name], *self._words(arguments))

    def _words(self, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
        return (*self._first_words, *arguments)
