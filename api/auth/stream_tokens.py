"""StreamTokens: short-lived signed tokens for one job's stream, for use in a URL.

A browser's EventSource cannot set headers. So a client with a key requests a token and puts it into
the URL, where logs and histories see it: it opens one stream, for minutes, and nothing else. All
frontends share the secret that signs it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from typing import Annotated

from api.dependencies import provided
from api.request_errors import invalid_api_key
from shared.transport.ports.admission import SubmittingStore

PURPOSE = "stream-tokens"
MAX_TOKEN_CHARS = 256
TOKEN_LIFE_S = 600


class StreamTokens:
    """Signs and checks tokens. Times are Unix seconds of the frontends' clocks."""

    def __init__(self, store: SubmittingStore) -> None:
        self._store = store

    async def new(self, job_id: str, tenant: str, key_id: str) -> tuple[str, int]:
        """Returns a token for a job of the tenant, and when it expires. `key_id`: of the key that
        asks for it, "" without keys. Raises TransportError."""
        ends_s = int(time.time()) + TOKEN_LIFE_S
        mac = _mac(await self._store.shared_secret(PURPOSE), job_id, tenant, key_id, ends_s)
        return f"{ends_s}.{mac}.{key_id}.{tenant}", ends_s

    async def opened_by(self, token: str, job_id: str) -> tuple[str, str]:
        """Returns the tenant whose job the token opens, and the id of the key it was made with.

        Raises ApiError (401) for a token that is expired or not for this job, and TransportError.
        """
        ends, _, rest = token.partition(".")
        mac, _, rest = rest.partition(".")
        key_id, _, tenant = rest.partition(".")
        if len(token) <= MAX_TOKEN_CHARS and ends.isascii() and ends.isdigit() and token.isascii():
            secret = await self._store.shared_secret(PURPOSE)
            if hmac.compare_digest(mac, _mac(secret, job_id, tenant, key_id, int(ends))):
                if int(ends) > time.time():
                    return tenant, key_id
                raise invalid_api_key("The token in the URL has expired.")
        raise invalid_api_key("The token in the URL is not valid for this stream.")


def _mac(secret: bytes, job_id: str, tenant: str, key_id: str, ends_s: int) -> str:
    payload = f"{ends_s}\n{tenant}\n{key_id}\n{job_id}".encode()
    digest = hmac.new(secret, payload, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


StreamTokensDep = Annotated[StreamTokens, provided(StreamTokens)]
