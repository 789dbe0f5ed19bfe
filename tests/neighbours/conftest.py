"""One service with its default settings, which two tenants share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from api.auth.keys import digest_of, new_key
from tests.neighbours.bystanders import Notice
from tests.support.job_history import APPEND, HISTORY, read_histories
from tests.support.launched import REPOSITORY, Launched
from tests.support.linearizability import check_history
from tests.support.redis_server import new_namespace, shared_server
from tests.support.throttle import FAULTS

QUIET_KEY, WORST_KEY = new_key(), new_key()
STEP_MS = 20  # of the echo runner: a token of each stream in each step


@dataclass(frozen=True)
class Shared:
    """A launched service, the keys of its tenants, and where histories are written."""

    penstock: Launched
    quiet_key: str
    worst_key: str
    history: Path
    calm: list[Notice] = field(default_factory=list)  # at most one period, measured once
    expected: dict[str, tuple[str, str]] = field(default_factory=dict)  # of its bystanders


@pytest.fixture(scope="module")
def echo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Everything at its default but for the keys, the runner, whose pace is known, and the places
    at work and in the queue, which a flood has to fill."""
    env = {"RUNNER": "echo", "ECHO_STEP_MS": str(STEP_MS)}
    env |= {"MAX_NUM_SEQS": "128", "MAX_QUEUED_JOBS": "190"}
    yield from launched(tmp_path_factory.mktemp("neighbours"), env)


@pytest.fixture(scope="module")
def joined_service(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Shared, str, str]]:
    """The service with the echo runner, and the URL and the namespace of its store, where models
    may join."""
    redis_url, namespace = shared_server(pytestconfig).url, new_namespace()
    env = {"RUNNER": "echo", "ECHO_STEP_MS": str(STEP_MS), "QUEUE_TIMEOUT_S": "1"}
    env |= {"REDIS_URL": redis_url, "NAMESPACE": namespace}
    for service in launched(tmp_path_factory.mktemp("neighbours"), env):
        yield service, redis_url, namespace


@pytest.fixture(scope="module")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Everything at its default but for the keys: the demo model, which compiles grammars."""
    yield from launched(tmp_path_factory.mktemp("neighbours"), {})


def launched(directory: Path, env: dict[str, str]) -> Iterator[Shared]:
    """Yields the service with two tenants; checks all histories when it has ended."""
    history = directory / "history"
    history.mkdir()
    (directory / "keys").write_text(
        f"{digest_of(QUIET_KEY)} tenant=quiet\n{digest_of(WORST_KEY)} tenant=worst\n"
    )
    env |= {
        "API_KEYS_FILE": str(directory / "keys"),
        "PYTHONPATH": f"{FAULTS}:{REPOSITORY}",
        HISTORY: str(history),
    }
    with Launched(directory, env, is_forked=False) as penstock:
        yield Shared(penstock, QUIET_KEY, WORST_KEY, history)
    check_histories(history)


def check_histories(directory: Path) -> None:
    """Checks every job that was recorded, those of worst clients by their worker's operations."""
    histories = read_histories(directory)
    kinds = {operation.kind for history in histories.values() for operation in history}
    assert APPEND in kinds, "the worker recorded nothing"
    for job_id, history in histories.items():
        check_history(job_id, history)
