"""API keys as an operator writes them down: one a line, hashed, each with its tenant.

    sha256:<64 hex digits> tenant=acme name=laptop requests_per_minute=60 tokens_per_minute=100000

Words after the digest: `tenant` (required), `name` (for logs), the limits below, and the bare words
`operator` (sees the jobs of all tenants) and `disabled`. `#` begins a comment. Limits are the
tenant's, on whichever of its lines they stand. A key has 256 bits from a random source, so that a
plain hash of it can be looked at by anybody; what people choose themselves would need a slow one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shared.settings import SettingsError

PREFIX = "sk-penstock-"
KEY_BYTES = 32
DIGEST_KIND = "sha256:"
MAX_KEYS = 10_000
MAX_LIMIT = 10**10
# A word of a line -> the member of AdmissionLimits that it bounds.
LIMITS = {
    "requests_per_minute": "requests_per_minute",
    "tokens_per_minute": "tokens_per_minute",
    "max_jobs": "max_jobs_per_tenant",
    "max_queued_jobs": "max_queued_jobs_per_tenant",
    "max_queued_tokens": "max_queued_tokens_per_tenant",
}

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,10}")


class KeysInvalid(SettingsError):
    """A sentence that names the line at fault, and repeats nothing of it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line."""

    digest: str  # "sha256:<hex>"
    tenant: str
    name: str = ""
    is_operator: bool = False
    is_disabled: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)  # by the members of AdmissionLimits


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """How a key is written down."""
    return DIGEST_KIND + hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """Lines end with a line break or `;`. Raises KeysInvalid; `where` says what was read."""
    keys: dict[str, ApiKey] = {}
    for number, words in _lines(text):
        try:
            key = _parse(words)
        except ValueError as error:
            raise KeysInvalid(f"{where}, line {number}: {error}.") from None
        if key.digest in keys:
            raise KeysInvalid(f"{where}, line {number}: this key is there already.")
        keys[key.digest] = key
    if len(keys) > MAX_KEYS:
        raise KeysInvalid(f"{where} has more than {MAX_KEYS} keys.")
    limits_by_tenant(keys.values(), where)
    return list(keys.values())


def limits_by_tenant(keys: Iterable[ApiKey], where: str) -> dict[str, dict[str, int]]:
    """Raises KeysInvalid where two lines of a tenant do not agree."""
    found: dict[str, dict[str, int]] = {}
    for key in keys:
        limits = found.setdefault(key.tenant, {})
        for name, value in key.limits.items():
            if limits.setdefault(name, value) != value:
                raise KeysInvalid(
                    f"{where}: two keys of the tenant {key.tenant} differ in a limit; limits are "
                    "the tenant's, and need to be said once."
                )
    return found


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(re.split(r"[\n;]", text), start=1):
        if words := line.partition("#")[0].split():
            yield number, words


def _parse(words: list[str]) -> ApiKey:
    digest, *rest = words
    if not _DIGEST.fullmatch(digest):
        raise ValueError(
            "must begin with sha256: and 64 hex digits (python -m api.keys makes such lines)"
        )
    said: dict[str, str] = {}
    flags: set[str] = set()
    limits: dict[str, int] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("operator", "disabled"):
            flags.add(word)
        elif name in ("tenant", "name") and equals:
            if not _NAME.fullmatch(value):
                raise ValueError(f"{name} has 1 to 64 letters, digits, '_', '.', '@' or '-'")
            said[name] = value
        elif name in LIMITS and equals:
            if not _NUMBER.fullmatch(value) or int(value) > MAX_LIMIT:
                raise ValueError(f"{name} is a whole number from 1 to {MAX_LIMIT}")
            limits[LIMITS[name]] = int(value)
        else:
            raise ValueError(
                "after the digest come tenant=, name=, operator, disabled and the limits "
                + ", ".join(f"{known}=" for known in LIMITS)
            )
    if "tenant" not in said:
        raise ValueError("tenant= is missing")
    return ApiKey(
        digest,
        said["tenant"],
        said.get("name", ""),
        "operator" in flags,
        "disabled" in flags,
        limits,
    )
