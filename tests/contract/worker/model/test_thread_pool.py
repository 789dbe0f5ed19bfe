"""The kernels' threads: results do not depend on the thread, and none waits for a lost core."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shared.cores import available_cores
from tests.support.busy_neighbours import busy_neighbours
from tests.support.cpu_kernels import NUM_THREADS, kernels
from tests.support.native_models import build_stack, run_step
from worker.engine_options import Quantization
from worker.model.cpu.library import NativeKernels

DRIVER = Path(__file__).with_name("thread_pool_driver.cpp")
HEADERS = Path(__file__).resolve().parents[4] / "worker" / "model" / "cpu"
SANITIZED = ("-O1", "-g", "-fsanitize=thread")
TIMEOUT_S = 120.0
STEP = [(40, 1), (16, 1), (20, 13), (0, 50)]
DECODE = [(90, 1)]
FORK = """
import os, torch
torch.set_num_threads(1)
from tests.support.cpu_kernels import kernels
from tests.support.native_models import build_stack, run_step
library = kernels("best")
library.set_num_threads(2)
stack, _ = build_stack(library, quantization="none")
step = [(40, 1), (0, 50)]
expected = run_step(stack, step).clone()
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(run_step(stack, step), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def library() -> Iterator[NativeKernels]:
    native = kernels("best")
    yield native
    native.set_num_threads(NUM_THREADS)


@pytest.fixture(scope="module", params=[("-O2",), SANITIZED], ids=["plain", "sanitized"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("driver") / "driver"
    command = ["g++", "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", *request.param]
    done = subprocess.run(
        [*command, f"-I{HEADERS}", str(DRIVER), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("what", ["stress", "lost-core", "lost-caller", "latecomers"])
def test_chunks_are_committed_once_without_waiting(driver: Path, what: str) -> None:
    """`lost-core` and `lost-caller` never end where a phase waits for all of its threads."""
    done = subprocess.run(
        [str(driver), what, "20"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_any_number_of_threads_gives_the_same_bits(
    library: NativeKernels, quantization: Quantization
) -> None:
    with busy_neighbours(2):
        stack, pool = build_stack(library, quantization=quantization)
        expected: tuple[torch.Tensor, torch.Tensor] | None = None
        begin = pool.storage.clone()
        for num_threads in (1, 2, 3, 8):
            library.set_num_threads(num_threads)
            for _ in range(4):
                pool.storage.copy_(begin)
                found = (run_step(stack, STEP).clone(), pool.storage.clone())
                expected = expected or found
                assert torch.equal(found[0], expected[0])
                assert torch.equal(found[1], expected[1])


def test_more_threads_than_cores_do_not_stand_in_each_others_way(library: NativeKernels) -> None:
    """A barrier that spins makes such a step tens of times as long."""
    stack, _ = build_stack(library, quantization="none", num_layers=24)
    times: dict[int, list[float]] = {}
    cores = available_cores()
    for _ in range(5):
        for num_threads in (cores, 2 * cores):
            library.set_num_threads(num_threads)
            for _ in range(20):
                begin_s = time.perf_counter()
                run_step(stack, DECODE)
                times.setdefault(num_threads, []).append(time.perf_counter() - begin_s)
    assert statistics.mean(times[2 * cores]) < 5 * statistics.mean(times[cores])


def test_a_forked_child_has_threads_of_its_own() -> None:
    """In a process where torch has one thread from the start: its runtime does not survive it."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], text=True, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
