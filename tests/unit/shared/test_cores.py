"""Cores that a process may use, from trees like those that Linux shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared import cores
from shared.cores import available_cores, default_threads, share_of_cores, wait_asleep


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return root


def test_without_cgroups_it_is_the_affinity(tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 8


def test_without_affinity_it_is_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores(tmp_path) == 16
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("6400000 100000", 8),
        ("nonsense", 8),
        ("100000 0", 8),
    ],
)
def test_a_quota_of_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    root = tree(tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": quota})
    assert available_cores(root) == expected


def test_a_group_above_may_be_the_narrower(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pod/cpu.max": "300000 100000",
        "sys/fs/cgroup/pod/box/cpu.max": "500000 100000",
    }
    assert available_cores(tree(tmp_path, "0::/pod/box", files)) == 3


def test_a_path_of_the_host_is_looked_for_at_the_mount(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "400000 100000"}
    assert available_cores(tree(tmp_path, "0::/kubepods/not/here", files)) == 4


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_a_quota_of_version_1(tmp_path: Path, mount: str) -> None:
    group = f"sys/fs/cgroup/{mount}/docker/abc"
    files = {f"{group}/cpu.cfs_quota_us": "250000", f"{group}/cpu.cfs_period_us": "100000"}
    lines = "11:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/"
    assert available_cores(tree(tmp_path, lines, files)) == 2
    files[f"{group}/cpu.cfs_quota_us"] = "-1"
    assert available_cores(tree(tmp_path, lines, files)) == 8


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("4,2", 4), ("", 6), ("0", 6), ("many", 6)]
)
def test_threads_are_those_of_openmp_or_the_cores(
    value: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads() == expected


@pytest.mark.parametrize(
    ("there", "workers", "expected"),
    [(2, 1, [2]), (2, 2, [1, 1]), (8, 3, [2, 3, 3]), (16, 4, [4] * 4), (2, 5, [1] * 5)],
)
def test_workers_share_the_cores(there: int, workers: int, expected: list[int]) -> None:
    assert [share_of_cores(there, workers, index) for index in range(workers)] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "1000"}, {"GOMP_SPINCOUNT": "1000"}),
    ],
)
def test_threads_sleep_while_they_wait_unless_the_operator_has_another_rule(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    wait_asleep(given)
    assert given == expected
