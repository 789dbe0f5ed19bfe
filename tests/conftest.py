"""What every test runs under."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import re
import sys
from collections.abc import Collection, Iterator
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import httpcore2
import httpx._transports.default
import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings
from hypothesis.internal.charmap import charmap, charmap_file, intervals_from_codec

from tests.support.document_check import raise_mismatch
from tests.support.examples import examples

# No example is judged by its time: on a busy machine every one is slow.
settings.register_profile(
    "penstock",
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")


def _make_unicode_tables() -> None:
    """Makes Hypothesis' tables of characters, which it keeps in a file, by one process at a time:
    while one writes them another one may find neither them nor the folder that they are made in."""
    tables = (charmap_file(), charmap_file("codec-v2-utf-8"))
    if all(table.exists() for table in tables):
        return
    folder = tables[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        charmap()
        intervals_from_codec("utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    _make_unicode_tables()


# Tensors in tests are tiny. With more threads, torch's threads spin while they wait for one another
# and for those of other test processes: the model's tests take four times the processor time. What
# several threads compute has tests that say how many: test_thread_pool, test_cpu_tiers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run in its interpreter, which is chosen before Triton is imported.
if os.environ.get("PENSTOCK_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Until all tests are collected the garbage collector rests: it would take a quarter of that time,
# in each of many processes. What is there then stays for good and is not looked through again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_NAMES = re.compile(r"\w+")
_MARKS = re.compile(r"\bmark\.(\w+)")
_SET_BY_HOOKS = {"asyncio", "chaos", "hypothesis"}  # marks of plugins and of a conftest.py
_OF_ALL_TESTS = re.compile(r"^pytestmark = (\[[^\]]*\]|.+)$", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out a file whose text shows that `-m` selects none of its tests: its imports may take
    seconds, in each of many processes."""
    names = set(_NAMES.findall(config.option.markexpr))
    if collection_path.suffix != ".py" or not names or names & _SET_BY_HOOKS:
        return None
    expression = Expression.compile(config.option.markexpr)
    text = collection_path.read_text(encoding="utf-8")
    of_all = {mark for marks in _OF_ALL_TESTS.findall(text) for mark in _MARKS.findall(marks)}
    of_some = sorted((set(_MARKS.findall(text)) - of_all) & names)
    for count in range(len(of_some) + 1):
        for chosen in combinations(of_some, count):
            if expression.evaluate(functools.partial(_is_among, of_all.union(chosen))):
                return None
    return True


def _is_among(marks: Collection[str], name: str, **_arguments: object) -> bool:
    return name in marks


# The rooms whose files take longest, which begin first: what begins last is not waited for alone.
LONGEST = (
    "tests/packages",
    "tests/clients",
    "tests/integration/worker",
    "tests/chaos",
    "tests/e2e",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        path = item.path.relative_to(config.rootpath).as_posix()
        return next((rank for rank, room in enumerate(LONGEST) if path.startswith(room)), 9)

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """The test that sent it fails by a body that the OpenAPI document does not allow."""
    yield
    raise_mismatch()


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Each HTTP client would read all authorities of the system for itself: 25 ms, thousands of
    times, to speak with a server on loopback."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (httpx._transports.default, "create_ssl_context"),
            (httpcore2, "default_ssl_context"),  # of the SDKs' clients
        ):
            patch.setattr(module, name, functools.cache(getattr(module, name)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _templates_render_in_forks() -> Iterator[None]:
    """Each service of a test starts a rendering process, whose imports are 0.1 s of a processor."""
    if "shared.text.chat_template" not in sys.modules:
        yield
        return
    from tests.support.forked import rendering_in_forks

    with rendering_in_forks():
        yield


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that call the command in this process: it changes the variables and the path, which
    tests of other files would find changed."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    with patch.dict(os.environ):
        yield
