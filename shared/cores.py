"""The cores that this process may use: its CPU affinity, bounded by its cgroup's quota."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_V1_CONTROLLER = "cpu"


def available_cores(root: Path = Path("/")) -> int:
    """Returns at least 1. A quota of half a core more than n counts as n.

    `root`: the folder of /proc and /sys. Without them, and without affinity (macOS), it is the
    machine's number of cores.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min([count, *(int(quota) for quota in _quotas(root))]))


def default_threads() -> int:
    """Returns OMP_NUM_THREADS if it is a number, else `available_cores`."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(setting) if setting.isdecimal() and int(setting) > 0 else available_cores()


def wait_asleep(environment: MutableMapping[str, str]) -> None:
    """Has OpenMP's threads sleep while they wait for each other, unless a variable of the operator
    has another rule. Only before torch is imported: its library reads the variables once.

    A thread that spins keeps its core from the very thread that it waits for: with another process
    on the machine each of a step's hundreds of operators then costs milliseconds.
    """
    if "GOMP_SPINCOUNT" not in environment:
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def share_of_cores(cores: int, workers: int, index: int) -> int:
    """Returns the threads of worker `index` of `workers`: together all cores, each at least 1."""
    return max(1, cores * (index + 1) // workers - cores * index // workers)


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each cgroup above this process may use, where it is limited."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _from_root_to(path, mounts):
                yield from _v2_quota(group)
        elif _V1_CONTROLLER in controllers.split(","):
            for mount in (mounts / controllers, mounts / _V1_CONTROLLER):
                for group in _from_root_to(path, mount):
                    yield from _v1_quota(group)


def _from_root_to(path: str, mount: Path) -> Iterator[Path]:
    """Yields the mount point and each group below it on the way: a limit above binds those below.

    In a container the path may be the host's, which is not there: then the mount point is all.
    """
    group = mount
    yield group
    for name in Path(path).parts:
        if name not in ("/", ".."):
            group = group / name
            yield group


def _v2_quota(group: Path) -> Iterator[float]:
    cells = _read(group / "cpu.max").split()  # "max 100000", or microseconds of each period
    if len(cells) == 2 and cells[0].isdecimal() and cells[1].isdecimal() and int(cells[1]):
        yield int(cells[0]) / int(cells[1])


def _v1_quota(group: Path) -> Iterator[float]:
    quota = _read(group / "cpu.cfs_quota_us")  # -1: no limit
    period = _read(group / "cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(period):
        yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
