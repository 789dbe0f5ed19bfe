"""Steps that are replayed say what the stack says, whatever lies in the buffers' padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.native_models import CPU, QWEN3, new_model, new_pool, run_step
from tests.support.triton_device import IS_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip("the double of a graph runs in the interpreter", allow_module_level=True)

from tests.support.graph_double import GraphDouble, NotCapturable
from worker.engine.errors import DeviceLost
from worker.model.cuda.graphs import DecodeGraphs, graph_sizes
from worker.model.cuda.stack import CudaOps, CudaStack

pytestmark = pytest.mark.triton
DTYPE = torch.float32
# Decodes of several sizes, then a step with a chunk, then fewer decodes than before: the rows that
# they leave must become padding again.
STEPS = [
    [(5, 1), (40, 1), (16, 1)],
    [(3, 1)],
    [(5, 1), (40, 1), (16, 1), (9, 1), (2, 1)],
    [(40, 1), (0, 4)],
    [(7, 1), (8, 1)],
]


def graphs(max_num_seqs: int = 5) -> tuple[DecodeGraphs, CudaStack, list[torch.Tensor]]:
    """Returns captured graphs, a stack over a pool of its own, and the storages of both pools."""
    model = new_model(QWEN3 | {"num_hidden_layers": 2}, CudaOps(), dtype=DTYPE)
    pools = [new_pool(model.config, dtype=DTYPE) for _ in range(2)]
    stacks = [CudaStack(model, pool) for pool in pools]
    replayed = DecodeGraphs(stacks[0], max_num_seqs=max_num_seqs, max_blocks=6, device=CPU)
    replayed.capture_by(GraphDouble(), lambda share: None)
    return replayed, stacks[1], [pool.storage for pool in pools]


def test_replayed_steps_are_those_of_the_stack() -> None:
    replayed, stack, storages = graphs()
    storages[1].copy_(storages[0])  # capturing wrote nothing: padding has no slot
    for step in STEPS:
        expected, seen = run_step(stack, step), run_step(replayed, step)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4, msg=str(step))
        torch.testing.assert_close(storages[0], storages[1], rtol=1e-4, atol=1e-4, msg=str(step))


def test_capturing_writes_into_no_block() -> None:
    model = new_model(QWEN3 | {"num_hidden_layers": 1}, CudaOps(), dtype=DTYPE)
    pool = new_pool(model.config, dtype=DTYPE)
    before = pool.storage.clone()
    replayed = DecodeGraphs(CudaStack(model, pool), max_num_seqs=2, max_blocks=6, device=CPU)
    shares: list[float] = []
    replayed.capture_by(GraphDouble(), shares.append)
    assert torch.equal(pool.storage, before)
    assert shares == [0.0, 0.5, 1.0]


def test_rows_that_are_padding_reach_nothing() -> None:
    replayed, stack, _ = graphs()
    run_step(replayed, STEPS[2])
    run_step(stack, STEPS[2])
    expected = run_step(stack, STEPS[0])
    # A block that is far outside of the pool: the interpreter refuses what would read it.
    buffers = replayed._buffers
    buffers.table[3:].fill_(1 << 20)
    seen = run_step(replayed, STEPS[0])
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    assert buffers.seq_lens.tolist()[:4] == [6, 41, 17, 0]
    assert buffers.slots.tolist()[3] == -1


class Failing:
    """A `Capture` for which graphs of these sizes fail; `error` says how."""

    def __init__(self, sizes: set[int], error: Exception) -> None:
        self._double = GraphDouble()
        self._sizes = sizes
        self._error = error

    def __call__(self, run: Any) -> Callable[[], torch.Tensor]:
        (size,) = run.args
        if size in self._sizes:
            raise self._error
        return self._double(run)


def uncaptured() -> tuple[DecodeGraphs, CudaStack]:
    """Returns graphs of 1, 2, 4 and 8 decodes, and the stack that they are of."""
    model = new_model(QWEN3 | {"num_hidden_layers": 1}, CudaOps(), dtype=DTYPE)
    stack = CudaStack(model, new_pool(model.config, dtype=DTYPE))
    return DecodeGraphs(stack, max_num_seqs=5, max_blocks=6, device=CPU), stack


@pytest.mark.parametrize(
    ("failing", "captured"), [({1, 2, 4, 8}, []), ({1, 2, 4}, [8]), ({2, 4, 8}, [1])]
)
def test_memory_that_runs_out_leaves_the_graphs_that_fit(
    failing: set[int], captured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    replayed, stack = uncaptured()
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    shares: list[float] = []
    with caplog.at_level("WARNING"):
        replayed.capture_by(Failing(failing, full), shares.append)
    assert list(replayed._captured) == captured
    most = max(captured, default=0)
    assert f"captured {len(captured)} of 4 sizes, up to {most} sequences" in caplog.text
    assert shares[-1] == 1.0
    step = [(5, 1)]
    torch.testing.assert_close(run_step(replayed, step), run_step(stack, step))


def test_a_device_that_is_lost_in_a_capture_ends_the_engine() -> None:
    replayed, _ = uncaptured()
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="an illegal memory access"):
        replayed.capture_by(Failing({8}, lost), lambda share: None)
    with pytest.raises(ValueError, match="a bug"):
        replayed.capture_by(Failing({8}, ValueError("a bug")), lambda share: None)


def test_sizes_end_with_one_that_all_sequences_fit_into() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 4]
    for most in (4, 5, 33, 256, 300):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-2] < most <= sizes[-1]


def test_the_double_is_as_strict_as_a_graph() -> None:
    buffer, weights = torch.zeros(4), torch.arange(4.0)
    replay = GraphDouble()(lambda: (buffer * weights).sum() + 1)
    buffer.fill_(1)
    assert replay().item() == 7
    buffer = torch.full((4,), 5.0)
    assert replay().item() == 7, "a tensor that was replaced is not seen"
    for read_by_the_host in (
        lambda: buffer[buffer > 2],
        lambda: buffer * float(buffer.sum()),
        lambda: buffer.nonzero(),
    ):
        with pytest.raises(NotCapturable):
            GraphDouble()(read_by_the_host)
