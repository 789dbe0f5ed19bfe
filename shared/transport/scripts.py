"""The Lua transitions: loaded from their files, called by their hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

from shared.keys import Keys
from shared.redis.pool import Command, Commands, Word

TRANSITIONS = (
    "announce",
    "append",
    "attach",
    "batch_cancel",
    "batch_claim",
    "batch_create",
    "batch_end",
    "batch_save",
    "beat",
    "claim",
    "confirm",
    "crashed",
    "detach",
    "file_drop",
    "file_put",
    "file_sweep",
    "finish",
    "forget",
    "keep",
    "letter_drop",
    "look",
    "oversubscribe",
    "position",
    "pull",
    "reap",
    "recover",
    "release",
    "renew",
    "restore",
    "retire",
    "submit",
)

_INCLUDE = re.compile(r"^--@include (\S+)$", re.MULTILINE)
_BROADCAST = "local PUBLISH = 'PUBLISH'"
_SHARDED = "local PUBLISH = 'SPUBLISH'"

Argument = Word


def load_sources(*, is_sharded: bool = False) -> Mapping[str, str]:
    """Each transition's whole text, with its includes in their places.

    `is_sharded`: frames go to sharded channels, as in a cluster.
    """
    folder = resources.files("shared.transport") / "lua"

    def include(match: re.Match[str]) -> str:
        return folder.joinpath(*match[1].split("/")).read_text(encoding="utf-8")

    sources = {
        name: _INCLUDE.sub(include, (folder / f"{name}.lua").read_text(encoding="utf-8"))
        for name in TRANSITIONS
    }
    if is_sharded:
        return {name: source.replace(_BROADCAST, _SHARDED) for name, source in sources.items()}
    return sources


class Scripts:
    """Calls transitions of one partition by EVALSHA, and by EVAL where the server forgot them.

    `retain_ms` is how long an ended job stays readable.
    """

    def __init__(self, keys: Keys, retain_ms: int, *, is_sharded: bool = False) -> None:
        self._retain_ms = retain_ms
        # While a cluster moves a slot key by key, a script would find and write a part of its keys.
        # One that names a key which is nowhere is refused before it begins, with TRYAGAIN or ASK.
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
