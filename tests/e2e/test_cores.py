"""`make run` divides the cores over its workers, and leaves alone what the environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cores import available_cores
from tests.support.launched import Launched


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"PENSTOCK_NUM_THREADS": str(max(1, available_cores() // 2))}),
        ({"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "5"}),
        ({"PENSTOCK_NUM_THREADS": "3"}, {"PENSTOCK_NUM_THREADS": "3"}),
    ],
    ids=["shared", "openmp", "said"],
)
def test_two_workers_and_the_cores(
    env: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    both = {"WORKERS": "2", "RUNNER": "echo", "OMP_NUM_THREADS": "", **env}
    with Launched(tmp_path, both) as penstock:
        found = [variables for pid in penstock.descendants() if (variables := worker_env(pid))]
    assert len(found) == 2
    for variables in found:
        assert {name: v for name, v in variables.items() if v} == expected


def worker_env(pid: int) -> dict[str, str]:
    """What a worker was started with about its threads; empty for any other process."""
    if not Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"-m\0worker\0"):
        return {}
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    return {name: variables.get(name, "") for name in ("PENSTOCK_NUM_THREADS", "OMP_NUM_THREADS")}
