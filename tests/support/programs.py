"""Agent programs as users install them, each in a home of its own, against a service under test."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.process import dying_with_this_process
from tests.support.frameworks import NOWHERE
from tests.support.node import installed_clients
from tests.support.pinned_environment import pinned_environment

PINS = Path(__file__).resolve().parents[1] / "clients/programs"
MCP_SERVER = [sys.executable, str(PINS / "mcp_server.py")]
MODEL = "penstock"
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Place:
    """Where a program runs: its home, the folder that it works in, and the service.

    `window`: the context in tokens by which it decides when to summarize; None: as it is installed.
    """

    home: Path
    folder: Path
    base_url: str
    window: int | None = None

    @classmethod
    def make(cls, directory: Path, base_url: str, window: int | None = None) -> Place:
        place = cls(directory / "home", directory / "work", base_url, window)
        for path in (place.home, place.folder):
            path.mkdir()
        return place

    def config(self, name: str, text: str) -> Path:
        """Writes a file below the program's home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(self, command: list[str], **env: str) -> str:
        """Runs a program to its end. Returns what it prints; AssertionError where it fails."""
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.home),
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                "HTTPS_PROXY": NOWHERE,
                "HTTP_PROXY": NOWHERE,
                "NO_PROXY": "127.0.0.1",
                **env,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            preexec_fn=dying_with_this_process(),
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout


def _packages() -> Path:
    return installed_clients(PINS) / "node_modules"


def codex(place: Place, prompt: str) -> str:
    command, *arguments = MCP_SERVER
    limit = "" if place.window is None else f"model_auto_compact_token_limit = {place.window}"
    place.config(
        ".codex/config.toml",
        f"""\
{limit}
model = "{MODEL}"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "{place.base_url}/v1"
wire_api = "responses"
[mcp_servers.gauge]
command = {json.dumps(command)}
args = {json.dumps(arguments)}
""",
    )
    program = str(
        _packages() / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
    )
    unsandboxed = "--dangerously-bypass-approvals-and-sandbox"
    return place.run([program, "exec", "--skip-git-repo-check", unsandboxed, prompt])


def claude_code(place: Place, prompt: str) -> str:
    command, *arguments = MCP_SERVER
    server = {"command": command, "args": arguments}
    config = place.config("mcp.json", json.dumps({"mcpServers": {"gauge": server}}))
    program = str(_packages() / "@anthropic-ai/claude-code-linux-x64/claude")
    return place.run(
        [
            program,
            "-p",
            prompt,
            "--model",
            MODEL,
            "--dangerously-skip-permissions",
            "--mcp-config",
            str(config),
        ],
        ANTHROPIC_BASE_URL=place.base_url,
        ANTHROPIC_API_KEY="none",
        IS_SANDBOX="1",  # root may skip permissions
        **({} if place.window is None else {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.window)}),
    )


def opencode(place: Place, prompt: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Penstock",
        "options": {"baseURL": f"{place.base_url}/v1"},
        "models": {
            MODEL: {}
            if place.window is None
            else {"limit": {"context": place.window, "output": 2000}}
        },
    }
    config = {
        "provider": {"penstock": provider},
        "model": f"penstock/{MODEL}",
        "mcp": {"gauge": {"type": "local", "command": MCP_SERVER}},
    }
    place.config(".config/opencode/opencode.json", json.dumps(config))
    return place.run([str(_packages() / "opencode-linux-x64/bin/opencode"), "run", prompt])


def aider(place: Place, prompt: str) -> str:
    python = pinned_environment(PINS / "aider.txt", "programs") / "bin/python"
    return place.run(
        [
            str(python),
            "-m",
            "aider",
            "--model",
            f"openai/{MODEL}",
            "--yes-always",
            "--no-git",
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--message",
            prompt,
            "notes.txt",
        ],
        OPENAI_API_BASE=f"{place.base_url}/v1",
        OPENAI_API_KEY="none",
    )


PROGRAMS: Mapping[str, Callable[[Place, str], str]] = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": opencode,
    "aider": aider,
}


def write_picture(path: Path) -> None:
    """Writes a PNG of one grey pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0\x80")
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
