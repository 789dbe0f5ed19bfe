"""docker-compose.yml as Docker reads it, as far as this repository's uses it: interpolation,
profiles, and the fields of a service that a container is started from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def interpolate(text: str, env: Mapping[str, str]) -> str:
    """Replaces `${NAME}`, `${NAME:-default}`, `${NAME:+other}`, which nest, and `$$`.

    Raises ValueError for a form that compose has and this does not know.
    """
    result, at = [], 0
    while at < len(text):
        if text.startswith("$$", at):
            result.append("$")
            at += 2
        elif text.startswith("${", at):
            end = _closing(text, at + 2)
            result.append(_value(text[at + 2 : end], env))
            at = end + 1
        elif text[at] == "$":
            raise ValueError(f"not a form that is known: {text[at:]!r}")
        else:
            result.append(text[at])
            at += 1
    return "".join(result)


def _closing(text: str, begin: int) -> int:
    depth = 1
    for at in range(begin, len(text)):
        depth += text.startswith("${", at) - (text[at] == "}")
        if depth == 0:
            return at
    raise ValueError(f"no closing brace: {text!r}")


def _value(inner: str, env: Mapping[str, str]) -> str:
    found = re.fullmatch(r"(\w+)(?::([-+])(.*))?", inner, re.S)
    if found is None:
        raise ValueError(f"not a form that is known: {inner!r}")
    name, operator, other = found.groups()
    value = env.get(name, "")
    if operator == "-":
        return value or interpolate(other, env)
    if operator == "+":
        return interpolate(other, env) if value else ""
    return value


def _interpolated(node: Any, env: Mapping[str, str]) -> Any:
    if isinstance(node, str):
        return interpolate(node, env)
    if isinstance(node, list):
        return [_interpolated(item, env) for item in node]
    if isinstance(node, dict):
        return {key: _interpolated(value, env) for key, value in node.items()}
    return node


def seconds(duration: str) -> float:
    """Returns the seconds of `5s`, `1m30s`, `1h`."""
    found = DURATION.fullmatch(duration)
    assert found is not None, duration
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)


@dataclass(frozen=True)
class Service:
    """One service; `raw` is its mapping, interpolated."""

    name: str
    raw: dict[str, Any]
    env: Mapping[str, str]

    @property
    def profiles(self) -> list[str]:
        return list(self.raw.get("profiles", []))

    @property
    def environment(self) -> dict[str, str]:
        """Variables with a value, and those without one that are set where compose runs."""
        given = self.raw.get("environment", {})
        passed = {
            name: self.env.get(name) if value is None else value for name, value in given.items()
        }
        return {name: str(value) for name, value in passed.items() if value is not None}

    @property
    def build_args(self) -> dict[str, str]:
        given = self.raw["build"].get("args", {})
        passed = {
            name: self.env.get(name) if value is None else value for name, value in given.items()
        }
        return {name: str(value) for name, value in passed.items() if value is not None}

    @property
    def needs(self) -> dict[str, str]:
        """Services that must be there first, with the condition."""
        given = self.raw.get("depends_on", {})
        if isinstance(given, list):
            return dict.fromkeys(given, "service_started")
        return {name: of["condition"] for name, of in given.items()}

    @property
    def stop_grace_s(self) -> float:
        return seconds(self.raw.get("stop_grace_period", "10s"))

    def published(self) -> dict[int, str]:
        """Returns where each port of the container is published: `address:port`."""
        parts = [port.rpartition(":") for port in self.raw.get("ports", [])]
        return {int(target): address for address, _, target in parts}


class ComposeFile:
    """The services of one file, read with variables of the shell and of `.env` beside it."""

    def __init__(self, path: Path, shell: Mapping[str, str]) -> None:
        self.env = {**_dotenv(path.with_name(".env")), **shell}
        content = yaml.safe_load(path.read_text())
        self.directory = path.parent
        self.volumes = set(content["volumes"])
        self.services = {
            name: Service(name, _interpolated(raw, self.env), self.env)
            for name, raw in content["services"].items()
        }

    def enabled(self, profiles: set[str] | None = None) -> dict[str, Service]:
        """Returns the services without a profile, and those of `profiles`, else of
        COMPOSE_PROFILES; those that are needed come first."""
        chosen = profiles or set(filter(None, self.env.get("COMPOSE_PROFILES", "").split(",")))
        ordered: dict[str, Service] = {}

        def add(service: Service) -> None:
            for name in service.needs:
                add(self.services[name])
            ordered.setdefault(service.name, service)

        for service in self.services.values():
            if not service.profiles or chosen & set(service.profiles):
                add(service)
        return ordered


def _dotenv(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}
