"""The operator's pages (docs/guides/operate), and a shell that runs their command lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.launcher.redis_server import find_server_binary
from tests.support.launched import REPOSITORY
from tests.support.redis_topologies import HAS_WAITAOF
from tests.support.terminal import Terminal

OPERATE = REPOSITORY / "docs/guides/operate"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
COMMENT = re.compile(r"\s+# .*$")
NOT_WALKED = ("systemctl ", "kubectl ", "helm ")  # what needs a cluster or an init system
SINCE_7_2 = ("+waitaof", "+client|setinfo")
RUN_S = 120.0


def lines_of(page: str) -> list[str]:
    """Returns the command lines of a page, without their comments."""
    blocks = BLOCK.findall((OPERATE / f"{page}.md").read_text())
    return [COMMENT.sub("", line) for block in blocks for line in block.splitlines()]


def access_list(password: str) -> list[str]:
    """Returns the command of the secure page that makes Penstock's user, for the server here."""
    (block,) = re.findall(r"```\n(ACL SETUSER .*?)```", (OPERATE / "secure.md").read_text(), re.S)
    left_out = () if HAS_WAITAOF else SINCE_7_2  # as the page has it
    words = block.replace(">SECRET", f">{password}").split()
    return [word for word in words if word not in left_out]


class Page:
    """The command lines of one page. `unwalked` are those that were not taken yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unwalked = [line for line in lines_of(name) if not line.startswith(NOT_WALKED)]

    def take(self, part: str, **given: object) -> str:
        """Returns the first line with this part that was not taken yet.

        `given`: the values of its placeholders. Fails where no line has it, or a placeholder is
        not in the line: the page has changed, or is wrong.
        """
        found = [line for line in self.unwalked if part in line]
        assert found, f"{self.name}.md has no line with {part!r} left: {self.unwalked}"
        self.unwalked.remove(line := found[0])
        for name, value in given.items():
            line, count = re.subn(rf"\b{name}\b", lambda _, value=value: str(value), line)
            assert count, f"{self.name}.md has no {name} in {found[0]!r}"
        return line


class Shell:
    """A bash in which `penstock` is this checkout's and `redis-server` the one found for it.

    `directory`: its working directory. `places`: what lines name, by what they name instead, for
    paths and ports that this machine keeps to others. `machine`: what precedes a command there.
    """

    def __init__(
        self,
        directory: Path,
        env: Mapping[str, str],
        places: Mapping[str, str] | None = None,
        machine: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._machine = machine
        self.places = dict(places or {})
        programs = directory / "programs"
        programs.mkdir(exist_ok=True)
        server = find_server_binary()
        assert server is not None, "no server was found"
        for name, command in (
            ("penstock", f"{sys.executable} -m penstock"),
            ("redis-server", server[0]),
        ):
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        self.env = {
            **{name: value for name, value in os.environ.items() if "PENSTOCK" not in name},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "TERM": "xterm",
            **env,
        }

    def run(self, line: str) -> str:
        """Runs a line to its end; returns what it printed. Fails for an exit code but 0."""
        ended = subprocess.run(
            self._command(line),
            cwd=self.directory,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S,
        )
        assert ended.returncode == 0, f"{line}: {ended.returncode}\n{ended.stdout}"
        return ended.stdout

    def start(self, line: str, **env: str) -> Terminal:
        """Returns a terminal in which a line runs that lasts."""
        return Terminal(self._command(line), self.directory, {**self.env, **env})

    def _command(self, line: str) -> list[str]:
        for name, place in self.places.items():
            line = line.replace(name, place)
        return [*self._machine, "bash", "-c", line]
