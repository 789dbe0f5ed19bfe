"""KeyRing: the keys that let requests in, as the file and the environment say now."""

from __future__ import annotations

import hmac
import logging
from dataclasses import replace
from pathlib import Path

from api.api_keys import ApiKey, KeysInvalid, digest_of, limits_by_tenant, parse_keys
from api.settings import ApiSettings
from shared.transport.base import AdmissionLimits

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
MAX_KEY_CHARS = 512  # presented; longer ones are no keys of ours


class KeyRing:
    """Without keys everybody is let in. Reads the file again when it has changed.

    Raises KeysInvalid with a sentence for the operator.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._in_environment = settings.api_keys
        self._path = Path(settings.api_keys_file) if settings.api_keys_file else None
        self._seen: tuple[int, int] | None = None  # mtime in ns and size of the file
        self._complaint = ""
        self._by_digest: dict[str, ApiKey] = {}
        self._limits: dict[str, dict[str, int]] = {}
        self._read()

    @property
    def is_open(self) -> bool:
        """No key was configured at all."""
        return self._path is None and not self._by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, presented: str) -> ApiKey | None:
        """The key's line; None for a key that is none.

        Digests are looked up and compared, never keys: nobody can choose how far a digest agrees
        with another one.
        """
        if len(presented) > MAX_KEY_CHARS:
            return None
        digest = digest_of(presented)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return found

    def limits_of(self, tenant: str, defaults: AdmissionLimits) -> AdmissionLimits:
        """What all tenants have, but for what the tenant's own lines say."""
        return replace(defaults, **self._limits.get(tenant, {}))

    async def refresh(self) -> None:
        """A file that cannot be used changes nothing: the keys that were known go on."""
        try:
            if self._path is not None and self._stamp(self._path) != self._seen:
                self._read()
                log.info("keys read", extra={"keys": len(self)})
            self._complaint = ""
        except KeysInvalid as error:
            if str(error) != self._complaint:  # once, not at every look
                log.error("keys not read", extra={"reason": str(error)})
            self._complaint = str(error)

    def _read(self) -> None:
        keys = parse_keys(self._in_environment, "API_KEYS")
        if self._path is not None:
            self._seen = self._stamp(self._path)
            keys += parse_keys(self._text(self._path), f"API_KEYS_FILE {self._path}")
        by_digest = {key.digest: key for key in keys}
        self._limits = limits_by_tenant(by_digest.values(), "API_KEYS and API_KEYS_FILE")
        self._by_digest = by_digest

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        try:
            found = path.stat()
        except OSError as error:
            raise KeysInvalid(f"API_KEYS_FILE {path}: {error.strerror}.") from None
        if found.st_size > MAX_FILE_BYTES:
            raise KeysInvalid(f"API_KEYS_FILE {path} is larger than {MAX_FILE_BYTES} bytes.")
        return found.st_mtime_ns, found.st_size

    @staticmethod
    def _text(path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise KeysInvalid(f"API_KEYS_FILE {path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise KeysInvalid(f"API_KEYS_FILE {path} is not UTF-8.") from None
