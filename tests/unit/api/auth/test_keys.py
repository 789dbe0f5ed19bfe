"""Keys: how they are made, written down, read, and looked up."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api import keys as command
from api.auth.keys import MAX_LIMIT, KeyRing, KeysInvalid, digest_of, new_key, parse_keys
from api.http.caller import Caller
from api.settings import ApiSettings
from shared.environment import variable_of
from shared.settings import SettingsError, load_settings
from shared.transport.ports.admission import AdmissionLimits

KEY = new_key()
DIGEST = digest_of(KEY)
OTHER = digest_of("another")


def ring(**settings: Any) -> KeyRing:
    return KeyRing(ApiSettings(redis_url="redis://x", **settings))


def test_a_line_says_whose_key_it_is_and_what_its_tenant_may() -> None:
    text = f"""
    # customers
    {DIGEST} tenant=acme name=laptop requests_per_minute=60 max_jobs=8  # the first
    {OTHER} tenant=ops operator disabled
    """
    first, second = parse_keys(text, "here")
    assert (first.digest, first.tenant, first.name) == (DIGEST, "acme", "laptop")
    assert first.limits == {"requests_per_minute": 60, "max_jobs_per_tenant": 8}
    assert (first.is_operator, first.is_disabled) == (False, False)
    assert (second.is_operator, second.is_disabled) == (True, True)
    assert parse_keys(f"{DIGEST} tenant=a; {OTHER} tenant=b;", "here")[1].tenant == "b"
    assert parse_keys("", "here") == []


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("{key} tenant=a", "sha256:"),
        ("sha256:abc tenant=a", "64 hex digits"),
        ("{digest}", "tenant= is missing"),
        ("{digest} tenant=", "tenant must have 1 to 64"),
        ("{digest} tenant=a/b", "tenant must have 1 to 64"),
        ("{digest} tenant=a requests_per_minute=0", "whole number"),
        (f"{{digest}} tenant=a max_jobs={MAX_LIMIT + 1}", "whole number"),
        ("{digest} tenant=a max_jobs=1.5", "whole number"),
        ("{digest} tenant=a colour=blue", "the digest may be followed by"),
        ("{digest} tenant=a max_jobs", "the digest may be followed by"),
        ("{digest} tenant=a\n{digest} tenant=b", "line 2: duplicate key"),
        ("{digest} tenant=a max_jobs=1\n{other} tenant=a max_jobs=2", "have different limits"),
    ],
)
def test_a_line_that_cannot_be_used_is_refused_in_words(line: str, output: str) -> None:
    with pytest.raises(KeysInvalid, match=output) as caught:
        parse_keys(line.format(key=KEY, digest=DIGEST, other=OTHER), "keys.txt")
    assert str(caught.value).startswith("keys.txt")
    assert KEY not in str(caught.value)


def test_a_ring_knows_its_keys_and_no_others() -> None:
    held = ring(api_keys=f"{DIGEST} tenant=acme")
    assert not held.is_open
    found = held.find(KEY)
    assert found is not None
    assert found.tenant == "acme"
    for wrong in ("", KEY[:-1], KEY + "x", DIGEST, "x" * 10_000, "é"):
        assert held.find(wrong) is None
    assert ring().is_open


def test_limits_are_the_tenants_and_the_rest_is_what_all_have() -> None:
    held = ring(api_keys=f"{DIGEST} tenant=a max_jobs=2\n{OTHER} tenant=a max_queued_jobs=5")
    defaults = AdmissionLimits(max_queued_jobs=77, requests_per_minute=9)
    assert held.limits_of("a", defaults) == AdmissionLimits(
        max_queued_jobs=77,
        requests_per_minute=9,
        max_jobs_per_tenant=2,
        max_queued_jobs_per_tenant=5,
    )
    assert held.limits_of("b", defaults) == defaults


@pytest.mark.promise(
    "Access: every route requires a key, hashed at rest, except the service's own pages and probes "
    "(`/metrics`, `/metrics/deployment` and the details of `/health` too)"
)
async def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{DIGEST} tenant=a")
    held = ring(api_keys_file=str(path), api_keys=f"{OTHER} tenant=b")
    assert held.find(KEY) is not None

    async def changed(text: str) -> None:
        path.write_text(text)
        stamp = path.stat().st_mtime_ns + 10**9
        os.utime(path, ns=(stamp, stamp))
        await held.refresh()

    with caplog.at_level(logging.ERROR):
        await changed("nonsense")
        await held.refresh()
    assert held.find(KEY) is not None
    assert len(caplog.records) == 1
    await changed("# nobody")
    assert held.find(KEY) is None
    assert held.find("another") is not None
    path.unlink()
    await held.refresh()
    assert held.find("another") is not None
    assert not held.is_open


async def test_a_second_tenants_first_key_ends_what_shows_the_whole_deployment_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    line = f"{DIGEST} tenant=acme\n"
    path.write_text(line)
    keys = ring(api_keys_file=str(path))
    (key,) = parse_keys(line, "test")
    stream = Caller("a", tenant="acme", scope="acme", is_operator=False, key_id=key.key_id)
    feed = replace(stream, is_operator=True)
    with keys.in_use(stream) as of_stream, keys.in_use(feed) as of_feed:
        path.write_text(line + f"{digest_of(new_key())} tenant=other\n")
        await keys.refresh()
        assert (of_stream.done(), of_feed.done()) == (False, True)
    with keys.in_use(replace(stream, tenant="other", scope="other")) as let_in_too_late:
        assert let_in_too_late.done()


def test_a_file_that_cannot_be_read_stops_the_process_in_words(tmp_path: Path) -> None:
    with pytest.raises(KeysInvalid, match="No such file"):
        ring(api_keys_file=str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysInvalid, match="UTF-8"):
        ring(api_keys_file=str(tmp_path / "binary"))


def test_the_command_makes_a_key_and_the_line_that_lets_it_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requested = ["--tenant", "acme", "--name", "laptop", "--operator", "--tokens-per-minute", "900"]
    assert command.main(requested) == 0
    output = capsys.readouterr()
    key, line = output.err.strip(), output.out.strip()
    assert len(key) > 50
    assert key not in line
    found = ring(api_keys=line).find(key)
    assert found is not None
    assert (found.tenant, found.name, found.is_operator) == ("acme", "laptop", True)
    assert found.limits == {"tokens_per_minute": 900}


def test_the_command_refuses_what_would_make_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--tenant", "a b"])
    assert caught.value.code == 2
    assert "tenant" in capsys.readouterr().err


@pytest.mark.promise("Access: without keys only this machine is served")
@pytest.mark.parametrize(
    ("settings", "is_served"),
    [
        ({}, True),
        ({"HOST": "localhost"}, True),
        ({"HOST": "::1"}, True),
        ({"HOST": "127.5.5.5"}, True),
        ({"HOST": "0.0.0.0"}, False),
        ({"HOST": "::"}, False),
        ({"HOST": "192.0.2.7"}, False),
        ({"HOST": "example.org"}, False),
        ({"HOST": "0.0.0.0", "API_KEYS": f"{DIGEST} tenant=a"}, True),
        ({"HOST": "0.0.0.0", "API_KEYS": " "}, False),
        ({"HOST": "0.0.0.0", "API_KEYS_FILE": "keys.txt"}, True),
        ({"HOST": "0.0.0.0", "ALLOW_WITHOUT_KEYS": "true"}, True),
        ({"HOST": "0.0.0.0", "PUBLISHED_HOST": "127.0.0.1"}, True),
        ({"HOST": "0.0.0.0", "PUBLISHED_HOST": "0.0.0.0"}, False),
    ],
)
def test_without_keys_only_this_machine_is_served(
    settings: dict[str, str], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"REDIS_URL": "redis://x", **settings}.items():
        monkeypatch.setenv(variable_of(name), value)
    if is_served:
        load_settings(ApiSettings)
        return
    with pytest.raises(SettingsError, match="ALLOW_WITHOUT_KEYS"):
        load_settings(ApiSettings)
