"""ALLOWED_HOSTS and CORS_ORIGINS: which hosts and origins they let in, and what they refuse."""

from __future__ import annotations

import functools

import httpx
import pytest
from fastapi import FastAPI

from api.auth.keys import digest_of, new_key
from api.main import create_app
from api.settings import ApiSettings
from shared.settings import SettingsError, load_settings

URL = "redis://127.0.0.1:1"
KEYS = f"{digest_of(new_key())} tenant=acme"


def settings(**values: str) -> ApiSettings:
    return ApiSettings(redis_url=URL, **values)  # type: ignore[arg-type]


@functools.cache
def app(**values: str) -> FastAPI:
    return create_app(settings(**values))


async def status(app: FastAPI, **headers: str) -> int:
    transport = httpx.ASGITransport(app)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        return (await client.get("/docs", headers=headers)).status_code


@pytest.mark.parametrize(
    ("allowed_hosts", "host", "is_allowed"),
    [
        ("", "penstock.example", False),
        ("penstock.example", "penstock.example:8000", True),
        ("penstock.example", "PENSTOCK.example.", True),
        ("Penstock.Example.", "penstock.example", True),
        ("penstock.example", "www.penstock.example", False),
        ("penstock.example", "localhost", True),
        ("penstock.example", "10.0.0.7", True),
        ("a.example, *.b.example", "x.b.example", True),
        ("a.example, *.b.example", "x.y.b.example", True),
        ("a.example, *.b.example", "b.example", False),
        ("a.example, *.b.example", "evilb.example", False),
        ("b\u00fccher.example", "xn--bcher-kva.example", True),
        ("my_box", "my_box", True),
        ("*", "evil.example", True),
    ],
)
async def test_a_host_is_on_the_list_or_of_this_machine(
    allowed_hosts: str, host: str, is_allowed: bool
) -> None:
    for keys in ("", KEYS):
        expected = is_allowed or bool(keys and not allowed_hosts)
        made = app(allowed_hosts=allowed_hosts, api_keys=keys)
        assert await status(made, host=host) == (200 if expected else 421)


async def test_the_name_that_it_listens_on_is_allowed() -> None:
    made = app(host="box.example", published_host="other.example", allow_without_keys="true")
    assert await status(made, host="box.example:8000") == 200
    assert await status(made, host="other.example") == 200
    assert await status(made, host="evil.example") == 421


@pytest.mark.parametrize("value", ["a.example:8000", "http://a.example", "a b", "*.*", "a,*b", "["])
def test_what_is_no_name_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", URL)
    monkeypatch.setenv("PENSTOCK_ALLOWED_HOSTS", value)
    with pytest.raises(SettingsError, match="ALLOWED_HOSTS"):
        load_settings(ApiSettings)


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost", True), ("http://localhost:3000", True), ("https://LOCALHOST:1", True),
        ("http://127.0.0.1:8080", True), ("http://[::1]:8080", True), ("http://a.localhost", True),
        ("null", False), ("", False), ("localhost", False), ("file://", False),
        ("ftp://localhost", False), ("https://evil.example", False), ("http://192.0.2.7", False),
        ("http://localhost.evil.example", False), ("http://localhost@evil.example", False),
        ("http://evil.example:80/http://localhost", False), ("http://localhost/", False),
    ],
)  # fmt: skip
async def test_without_keys_the_origins_of_this_machine_may_call(
    origin: str, is_allowed: bool
) -> None:
    assert await status(app(), origin=origin) == (200 if is_allowed else 403)
    assert await status(app(cors_origins="*"), origin=origin) == 200
    listed = app(cors_origins="https://friend.example")
    assert await status(listed, origin=origin) == 403
    assert await status(listed, origin="https://friend.example") == 200


async def test_the_servers_own_pages_may_call_wherever_it_is() -> None:
    made = app(allowed_hosts="penstock.example", cors_origins="https://friend.example")
    own = {"host": "penstock.example", "origin": "https://penstock.example"}
    assert await status(made, **own) == 200
    # A proxy that ends TLS and gives the request another host: the browser knows better.
    hidden = own | {"host": "127.0.0.1:8000"}
    assert await status(made, **hidden) == 403
    assert await status(made, **hidden, sec_fetch_site="same-origin") == 200
    for site in ("cross-site", "same-site", "none", ""):
        assert await status(made, **hidden, sec_fetch_site=site) == 403
    assert await status(made, host="penstock.example", origin="https://evil.example") == 403


async def test_origins_of_other_programs_can_be_listed() -> None:
    made = app(cors_origins="tauri://localhost, vscode-webview://*")
    assert await status(made, origin="tauri://localhost") == 200
    assert await status(made, origin="vscode-webview://abc") == 200
    for other in ("app://obsidian.md", "http://localhost:3000", "vscode-webviews://abc"):
        assert await status(made, origin=other) == 403
    added = app(cors_origins="default, https://friend.example")
    for origin in ("https://friend.example", "http://localhost:3000", "app://obsidian.md"):
        assert await status(added, origin=origin) == 200
    assert await status(added, origin="https://evil.example") == 403


PROGRAMS = (
    *("app://obsidian.md", "tauri://localhost", "capacitor://localhost", "ionic://localhost"),
    *("vscode-webview://1a2b", "vscode-file://vscode-app", "TAURI://LOCALHOST"),
)


@pytest.mark.parametrize("origin", PROGRAMS)
async def test_programs_may_call_without_keys(origin: str) -> None:
    assert await status(app(), origin=origin) == 200
    assert await status(app(cors_origins="https://friend.example"), origin=origin) == 403


@pytest.mark.parametrize(
    "origin",
    [
        *("file://", "file:///tmp/a.html", "FILE://", "null", "data:text/html", "blob:null"),
        *("ftp://example.com", "ws://a.example", "content://downloads", "about:blank", "://"),
        *("https://evil.example", "https:///tauri://localhost", "app://a, https://evil.example"),
    ],
)
async def test_no_page_of_the_web_counts_as_a_program(origin: str) -> None:
    assert await status(app(), origin=origin) == 403
