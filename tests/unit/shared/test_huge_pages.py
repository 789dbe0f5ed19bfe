"""The heap moves into huge pages; what lies there, and the memory that it takes, stays."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, mmap
from shared.huge_pages import collapse_heap

def taken():
    lines = open("/proc/self/smaps_rollup").read().splitlines()[1:]
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return {"rss": sizes["Rss:"], "huge": sizes["AnonHugePages:"]}

kept = [str(number) * 3 for number in range(400_000)]  # some 40 MB
sparse = mmap.mmap(-1, 60 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for place in range(0, len(sparse), 1 << 20):
    sparse[place] = 1
before = taken()
num_bytes = collapse_heap()
after = taken()
assert kept == [str(number) * 3 for number in range(400_000)]
print(json.dumps({"before": before, "after": after, "moved": num_bytes // 1024}))
"""


def can_collapse() -> bool:
    """Whether the kernel knows MADV_COLLAPSE: Linux 6.1 with huge pages built in."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    assert numbers is not None
    has_huge_pages = Path("/sys/kernel/mm/transparent_hugepage").is_dir()
    return (int(numbers[1]), int(numbers[2])) >= (6, 1) and has_huge_pages


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_a_heap_in_use_moves_and_what_is_mostly_free_stays_as_small_as_it_is() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    output = json.loads(run.stdout)
    if not can_collapse():
        assert output["before"]["huge"] == output["after"]["huge"], (
            "nothing is moved, and nothing fails"
        )
        return
    grown = {name: output["after"][name] - output["before"][name] for name in ("rss", "huge")}
    assert grown["huge"] == output["moved"]
    assert output["moved"] >= 4 * 1024
    assert grown["rss"] < output["moved"] / 4  # KiB
