"""Keys of tenants: their lines for API_KEYS, and clients that send them."""

from __future__ import annotations

import httpx

from api.auth.keys import digest_of, new_key


class Keys(dict[str, str]):
    """A new key by each name; `flags` are what its line says beside its digest.

    Without `tenant=` in them the tenant has the name.
    """

    def __init__(self, **flags: str) -> None:
        super().__init__((name, new_key()) for name in flags)
        self._lines = [
            f"{digest_of(self[name])} {'' if 'tenant=' in more else f'tenant={name}'} {more}"
            for name, more in flags.items()
        ]

    @property
    def lines(self) -> str:
        """The value of API_KEYS."""
        return "\n".join(self._lines)

    def client(self, base_url: str, name: str | None) -> httpx.Client:
        """A client that sends the key of this name, or none."""
        headers = {} if name is None else {"authorization": f"Bearer {self[name]}"}
        return httpx.Client(base_url=base_url, headers=headers, timeout=30)
