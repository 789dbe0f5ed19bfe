"""A library that lacks what Penstock uses is refused at start, by its version."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from redis.asyncio import ConnectionPool
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import api.process
import worker.main
from api.http import uvicorn_compat
from shared.compat import IncompatibleLibrary, check_library
from shared.redis import redis_compat

REPOSITORY = Path(__file__).resolve().parents[3]


class Part:
    def __init__(self) -> None:
        self.of_an_instance = 1

    def method(self) -> None: ...


def test_methods_and_attributes_of_instances_are_found_and_others_are_named() -> None:
    check_library("uvicorn>=0.34", {Part: ("method", "of_an_instance", "__init__")})
    with pytest.raises(IncompatibleLibrary) as refused:
        check_library("uvicorn>=0.34,<0.55", {Part: ("method", "gone", "_lost")})
    assert str(refused.value) == (
        f"uvicorn {version('uvicorn')} is not one that Penstock was tried with: it lacks "
        "Part.gone, Part._lost. Install one that was: pip install 'uvicorn>=0.34,<0.55'"
    )


def test_the_versions_that_were_tried_are_those_of_the_package() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    for tried in (uvicorn_compat.TRIED, redis_compat.TRIED):
        assert f'    "{tried}",\n' in project


def test_a_frontend_refuses_another_uvicorn_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(uvicorn_compat.USES, HttpToolsProtocol, ("_renamed",))
    assert api.process.main() == 2
    assert "it lacks HttpToolsProtocol._renamed" in capsys.readouterr().err


def test_a_worker_refuses_another_redis_py_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(redis_compat.USES, ConnectionPool, ("_renamed",))
    assert worker.main.main() == 2
    assert "it lacks ConnectionPool._renamed" in capsys.readouterr().err
