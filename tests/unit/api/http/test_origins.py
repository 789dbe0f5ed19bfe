"""Origins whose pages may call the server."""

from __future__ import annotations

import pytest

from api.http.origins import AllowedOrigins


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost", True),
        ("https://localhost:3000", True),
        ("http://my_app.localhost:8080", True),
        ("http://a.my-app.localhost.:8080", True),
        ("http://LOCALHOST", True),
        ("http://127.3.2.1:8080", True),
        ("http://[::1]:8080", True),
        ("http://localhost.example", False),
        ("http://notlocalhost", False),
        ("http://my_app.localhost@example.com", False),
        ("http://127.0.0.1.example", False),
        ("ftp://localhost", False),
        ("null", False),
    ],
)
def test_loopback_origins_are_those_of_this_machine(origin: str, is_allowed: bool) -> None:
    assert AllowedOrigins((), local=True).allows(origin) is is_allowed
    assert not AllowedOrigins(()).allows(origin)
