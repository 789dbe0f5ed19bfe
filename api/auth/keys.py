"""KeyRing: the API keys of the environment and of a file, which is read again when it changes.

Each line is a hashed key with its tenant:

    sha256:<64 hex digits> tenant=acme name=laptop requests_per_minute=60 tokens_per_minute=100000

Fields after the digest: `tenant` (required), `name` (for logs), the limits of LIMITS, and the flags
`operator` (sees the jobs of all tenants) and `disabled`. `#` begins a comment. Limits are the
tenant's, whichever of its lines has them. A key has 256 random bits, so a plain hash of it may be
public; a password would need a slow one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from api.settings import ApiSettings
from shared.settings import SettingsError
from shared.transport.ports.admission import AdmissionLimits

if TYPE_CHECKING:  # `penstock keys` needs no web stack
    from api.http.caller import Caller

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
IN_ENVIRONMENT = "PENSTOCK_API_KEYS"
IN_FILE = "PENSTOCK_API_KEYS_FILE"
MAX_KEY_CHARS = 512  # of a presented key
PREFIX = "sk-penstock-"
KEY_BYTES = 32
DIGEST_KIND = "sha256:"
MAX_KEYS = 10_000
KEY_ID_CHARS = 16
MAX_LIMIT = 10**10
# Field of a line -> member of AdmissionLimits.
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
    """Keys cannot be used. The message names the line and repeats nothing of it."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as its line describes it."""

    digest: str  # "sha256:<hex>"
    tenant: str
    name: str = ""
    is_operator: bool = False
    is_disabled: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)  # by the members of AdmissionLimits

    @property
    def key_id(self) -> str:
        """A part of the digest that names the key."""
        return self.digest.removeprefix(DIGEST_KIND)[:KEY_ID_CHARS]


class KeyRing:
    """The keys in use. Without keys every request is allowed.

    Raises KeysInvalid, whose message is for the operator.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._in_environment = settings.api_keys
        self._path = Path(settings.api_keys_file) if settings.api_keys_file else None
        self._seen: tuple[int, int] | None = None  # mtime in ns and size of the file
        self._last_error = ""
        self._by_digest: dict[str, ApiKey] = {}
        self._by_id: dict[str, ApiKey] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._in_use: dict[asyncio.Future[None], Caller] = {}
        self._read()

    @property
    def is_open(self) -> bool:
        """Whether no key is configured."""
        return self._path is None and not self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def tenants(self) -> list[str]:
        """Returns the tenants that have a key, sorted."""
        return sorted({key.tenant for key in self._by_digest.values()})

    def find(self, presented: str) -> ApiKey | None:
        """Returns the matching key, or None.

        Digests are looked up and compared, never keys: a client cannot choose how many bytes of a
        digest match another one.
        """
        if len(presented) > MAX_KEY_CHARS:
            return None
        digest = digest_of(presented)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return found

    def is_operator(self, key: ApiKey) -> bool:
        """Returns whether the key may see the whole deployment, of all tenants: an operator's key,
        or every key if all are of one tenant."""
        return key.is_operator or len(self._limits) == 1

    def allows(self, caller: Caller) -> bool:
        """Returns whether the caller's key still gives it the same tenant and the same rights. A
        stream token's caller is the tenant of its job, which an operator may see."""
        if self.is_open:
            return True
        key = self._by_id.get(caller.key_id)
        if key is None or key.is_disabled or (caller.is_operator and not self.is_operator(key)):
            return False
        if caller.scope is None:
            return key.is_operator and key.tenant == caller.tenant
        return key.is_operator or key.tenant == caller.tenant

    @contextmanager
    def in_use(self, caller: Caller) -> Iterator[asyncio.Future[None]]:
        """Yields a future that is done once `allows` is false of the caller."""
        revoked = asyncio.get_running_loop().create_future()
        self._in_use[revoked] = caller
        if not self.allows(caller):  # the file was read since it was let in
            revoked.set_result(None)
        try:
            yield revoked
        finally:
            del self._in_use[revoked]

    def limits_of(self, tenant: str, defaults: AdmissionLimits) -> AdmissionLimits:
        """Returns `defaults`, overridden by the limits on the tenant's own lines."""
        return replace(defaults, **self._limits.get(tenant, {}))

    async def refresh(self) -> None:
        """Reads the file if it has changed. A file that is invalid changes nothing."""
        try:
            if self._path is not None and self._stamp(self._path) != self._seen:
                self._read()
                log.info("reloaded the API keys file", extra={"keys": len(self)})
                self._end_revoked()
            self._last_error = ""
        except KeysInvalid as error:
            if str(error) != self._last_error:  # once, not at every check
                log.error(
                    "failed to read the API keys file; the previous keys stay valid",
                    extra={"reason": str(error)},
                )
            self._last_error = str(error)

    def _end_revoked(self) -> None:
        for revoked, caller in self._in_use.items():
            if not revoked.done() and not self.allows(caller):
                revoked.set_result(None)

    def _read(self) -> None:
        keys = parse_keys(self._in_environment, IN_ENVIRONMENT)
        if self._path is not None:
            self._seen = self._stamp(self._path)
            keys += parse_keys(self._text(self._path), f"{IN_FILE} {self._path}")
        by_digest = {key.digest: key for key in keys}
        self._limits = limits_by_tenant(by_digest.values(), f"{IN_ENVIRONMENT} and {IN_FILE}")
        self._by_digest = by_digest
        self._by_id = {key.key_id: key for key in keys}

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        try:
            found = path.stat()
        except OSError as error:
            raise KeysInvalid(f"{IN_FILE} {path}: {error.strerror}.") from None
        if found.st_size > MAX_FILE_BYTES:
            raise KeysInvalid(f"{IN_FILE} {path} is larger than {MAX_FILE_BYTES} bytes.")
        return found.st_mtime_ns, found.st_size

    @staticmethod
    def _text(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise KeysInvalid(f"{IN_FILE} {path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise KeysInvalid(f"{IN_FILE} {path} is not UTF-8.") from None


def new_key() -> str:
    """Returns a new random key."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """Returns the form in which a key is stored."""
    return DIGEST_KIND + hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """Returns the keys in `text`, whose lines end with a line break or `;`.

    Raises KeysInvalid with `where`, the name of the source.
    """
    keys: dict[str, ApiKey] = {}
    for number, fields in _lines(text):
        try:
            key = _parse(fields)
        except ValueError as error:
            raise KeysInvalid(f"{where}, line {number}: {error}.") from None
        if key.digest in keys:
            raise KeysInvalid(f"{where}, line {number}: duplicate key.")
        keys[key.digest] = key
    if len(keys) > MAX_KEYS:
        raise KeysInvalid(f"{where} has more than {MAX_KEYS} keys.")
    limits_by_tenant(keys.values(), where)
    return list(keys.values())


def limits_by_tenant(keys: Iterable[ApiKey], where: str) -> dict[str, dict[str, int]]:
    """Returns limits by tenant. Raises KeysInvalid if two lines of a tenant differ."""
    found: dict[str, dict[str, int]] = {}
    for key in keys:
        limits = found.setdefault(key.tenant, {})
        for name, value in key.limits.items():
            if limits.setdefault(name, value) != value:
                raise KeysInvalid(
                    f"{where}: two keys of the tenant {key.tenant} have different limits; a limit "
                    "is the tenant's: set it once."
                )
    return found


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(re.split(r"[\n;]", text), start=1):
        if fields := line.partition("#")[0].split():
            yield number, fields


def _parse(fields: list[str]) -> ApiKey:
    digest, *rest = fields
    if not _DIGEST.fullmatch(digest):
        raise ValueError(
            "must begin with sha256: and 64 hex digits (`penstock keys new` makes such lines)"
        )
    values: dict[str, str] = {}
    flags: set[str] = set()
    limits: dict[str, int] = {}
    for item in rest:
        name, equals, value = item.partition("=")
        if item in ("operator", "disabled"):
            flags.add(item)
        elif name in ("tenant", "name") and equals:
            if not _NAME.fullmatch(value):
                raise ValueError(f"{name} must have 1 to 64 letters, digits, '_', '.', '@' or '-'")
            values[name] = value
        elif name in LIMITS and equals:
            if not _NUMBER.fullmatch(value) or int(value) > MAX_LIMIT:
                raise ValueError(f"{name} must be a whole number from 1 to {MAX_LIMIT}")
            limits[LIMITS[name]] = int(value)
        else:
            raise ValueError(
                "the digest may be followed by tenant=, name=, operator, disabled and the limits "
                + ", ".join(f"{known}=" for known in LIMITS)
            )
    if "tenant" not in values:
        raise ValueError("tenant= is missing")
    return ApiKey(
        digest,
        values["tenant"],
        values.get("name", ""),
        "operator" in flags,
        "disabled" in flags,
        limits,
    )
