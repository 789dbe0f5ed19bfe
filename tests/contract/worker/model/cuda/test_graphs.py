"""Steps that are replayed say what the stack says, whatever lies in the buffers' padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support import native_models
from tests.support.native_models import QWEN3, new_model
from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton
from worker.engine.errors import DeviceLost

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from tests.support.step_graphs import new_capture, new_graphs
from worker.model.base import AttentionMetadata, DecoderStack
from worker.model.cuda import graphs
from worker.model.cuda.graphs import (
    StepGraphs,
    decode_sizes,
    launch_bound_tokens,
    mixed_shapes,
)
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.cuda.step_buffers import GraphShape
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NaN in padding
]
IN_THE_INTERPRETER = pytest.mark.skipif(not IS_INTERPRETED, reason="of the double of a graph")
DTYPE = torch.float32
# Decodes of several sizes, steps with chunks, then fewer decodes than before: the rows that they
# leave must become padding again.
STEPS = [
    [(5, 1), (40, 1), (16, 1)],
    [(3, 1)],
    [(5, 1), (40, 1), (16, 1), (9, 1)],
    [(40, 1), (0, 4)],
    [(7, 1), (3, 1), (0, 9), (17, 6)],
    [(0, 20)],
    [(7, 1), (8, 1)],
]


class CountingStack(CudaStack):
    """Counts the steps that it was called for, and not only captured for."""

    num_calls = 0

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.num_calls += 1
        return super().__call__(*arguments)  # type: ignore[arg-type]


def small_pool(model: CausalLM) -> KVCachePool:
    return native_models.new_pool(model.config, device=torch_device(), dtype=DTYPE)


def run_step(stack: DecoderStack, step: list[tuple[int, int]]) -> torch.Tensor:
    return native_models.run_step(stack, step, device=torch_device()).clone()


def small_model(num_layers: int = 1) -> CausalLM:
    shape = QWEN3 | {"num_hidden_layers": num_layers}
    return new_model(shape, CudaOps(), device=torch_device(), dtype=DTYPE)


def graphs_over(
    model: CausalLM, pool: KVCachePool, *, max_num_seqs: int = 4, max_num_tokens: int = 30
) -> tuple[StepGraphs, CountingStack]:
    stack = CountingStack(model, pool)
    graphs = new_graphs(
        model, stack, max_num_seqs=max_num_seqs, max_num_tokens=max_num_tokens, max_blocks=6
    )
    return graphs, stack


def test_replayed_steps_are_those_of_the_stack() -> None:
    model = small_model()
    pools = [small_pool(model) for _ in range(2)]
    replayed, inner = graphs_over(model, pools[0])
    replayed.capture_by(new_capture(), lambda share: None)
    stack = CudaStack(model, pools[1])
    # Capturing wrote into no block: padding has no slot.
    assert torch.equal(pools[0].storage, pools[1].storage)
    for step in STEPS:
        expected, seen = run_step(stack, step), run_step(replayed, step)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4, msg=str(step))
        torch.testing.assert_close(
            pools[0].storage, pools[1].storage, rtol=1e-4, atol=1e-4, msg=str(step)
        )
        best = replayed.best_tokens()
        if any(count > 1 for _, count in step):
            assert best is None, step
        else:
            logits = model.logits(expected)
            assert best is not None, step
            assert best[0][: len(step)].tolist() == logits.argmax(dim=1).tolist(), step
            torch.testing.assert_close(
                best[1][: len(step)], logits.amax(dim=1), rtol=1e-4, atol=1e-4
            )
    assert inner.num_calls == 0


@IN_THE_INTERPRETER
def test_steps_of_few_rows_are_replayed_in_the_faster_way() -> None:
    model = small_model(num_layers=2)
    pools = [small_pool(model) for _ in range(2)]
    replayed, inner = graphs_over(model, pools[0], max_num_seqs=2)
    num_products: list[int] = []
    gemv = inner.gemv_layers

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        num_products.append(1)
        return gemv(*arguments)  # type: ignore[arg-type]

    inner.gemv_layers = counted  # type: ignore[method-assign, assignment]
    replayed.capture_by(new_capture(fastest=1), lambda share: None)
    assert len(num_products) == 2  # of one row and of two
    stack = CudaStack(model, pools[1])
    for step in (STEPS[1], STEPS[-1]):
        expected = run_step(stack, step)
        seen = run_step(replayed, step)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4, msg=str(step))
        torch.testing.assert_close(pools[0].storage, pools[1].storage, rtol=1e-4, atol=1e-4)
        assert not torch.equal(seen, expected), "the other way sums in another order"
    assert inner.num_calls == 0


def test_what_has_no_graph_is_left_to_the_stack() -> None:
    model = small_model()
    pools = [small_pool(model) for _ in range(2)]
    replayed, inner = graphs_over(model, pools[0])
    stack = CudaStack(model, pools[1])
    step = [(5, 1), (0, 4)]
    torch.testing.assert_close(run_step(replayed, step), run_step(stack, step))
    replayed.capture_by(new_capture(), lambda share: None, largest_only=True)
    assert replayed.best_tokens() is None
    seen, expected = run_step(replayed, [(3, 1)]), run_step(stack, [(3, 1)])
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    assert inner.num_calls == 1, "the largest graph has room for smaller steps"


def test_steps_with_more_than_the_largest_graph_have_none() -> None:
    model = small_model()
    pool = small_pool(model)
    replayed, _ = graphs_over(model, pool, max_num_tokens=512)
    assert shape_of(replayed, (1,) * 3) == GraphShape(4, 4)
    assert shape_of(replayed, (1,) * 5) is None
    assert shape_of(replayed, (1, 2) + (4,) * 15) == GraphShape(64, 4, 16)
    assert shape_of(replayed, (4,) * 17) is None
    assert shape_of(replayed, (1, 511)) == GraphShape(512, 4, 16)
    assert shape_of(replayed, (513,)) is None


def test_capturing_reports_its_progress() -> None:
    model = small_model()
    replayed, _ = graphs_over(model, small_pool(model), max_num_seqs=1)
    shares: list[float] = []
    replayed.capture_by(new_capture(), shares.append)
    assert shares == [0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


def test_rows_that_are_padding_reach_nothing() -> None:
    model = small_model()
    replayed, _ = graphs_over(model, small_pool(model))
    replayed.capture_by(new_capture(), lambda share: None)
    stack = CudaStack(model, small_pool(model))
    buffers = replayed._buffers
    for step in (STEPS[0], STEPS[4]):
        run_step(replayed, STEPS[2])
        run_step(stack, STEPS[2])
        expected = run_step(stack, step)
        # A block that is far outside of the pool: the interpreter refuses what would read it.
        buffers.tables.fill_(1 << 20)
        buffers.slots.fill_(1 << 20)
        buffers.hidden.fill_(torch.nan)
        seen = run_step(replayed, step)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    assert buffers.seq_lens[:8].tolist() == [8, 4, 0, 0, 9, 23, 0, 0]  # four decodes, then chunks
    assert buffers.slots[0, 17:32].tolist() == [-1] * 15
    assert buffers.cu_q[4:8].tolist() == [2, 11, 17, 17]


def shape_of(replayed: StepGraphs, query_lens: tuple[int, ...]) -> GraphShape | None:
    nothing = torch.zeros(1, dtype=torch.int32)
    return replayed.shape_of(
        AttentionMetadata(
            cu_q=nothing,
            seq_lens=nothing,
            block_tables=nothing[None, None],
            slots=nothing[None],
            num_decodes=query_lens.count(1),
            max_query_len=max(query_lens),
            num_tokens=sum(query_lens),
            query_lens=query_lens,
            context_lens=query_lens,
        )
    )


class Failing:
    """A `Capture` for which graphs of some shapes fail; `error` says how."""

    def __init__(self, fails: Callable[[GraphShape], bool], error: Exception) -> None:
        self._capture = new_capture()
        self._fails = fails
        self._error = error

    def __call__(self, run: Any) -> Any:
        (of_run,) = run.args
        if isinstance(of_run, GraphShape) and self._fails(of_run):
            raise self._error
        return self._capture(run)

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return 0


@pytest.mark.parametrize(
    ("fails", "captured"),
    [
        (lambda shape: True, []),
        (lambda shape: shape.tokens < 32, [(32, 0), (32, 2)]),
        (lambda shape: shape.tokens > 1, [(1, 1)]),
    ],
)
def test_memory_that_runs_out_leaves_the_graphs_that_fit(
    fails: Callable[[GraphShape], bool],
    captured: list[tuple[int, int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = small_model()
    pools = [small_pool(model) for _ in range(2)]
    replayed, inner = graphs_over(model, pools[0], max_num_seqs=2)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    shares: list[float] = []
    with caplog.at_level("WARNING"):
        replayed.capture_by(Failing(fails, full), shares.append)
    most = max((tokens for tokens, _ in captured), default=0)
    assert f"captured {len(captured)} of 4 shapes, up to {most} tokens" in caplog.text
    assert shares[-1] == 1.0
    stack = CudaStack(model, pools[1])
    for step, shape in (([(5, 1)], (1, 1)), ([(5, 1), (0, 4)], (32, 2))):
        before = inner.num_calls
        torch.testing.assert_close(
            run_step(replayed, step), run_step(stack, step), rtol=1e-4, atol=1e-4
        )
        assert (inner.num_calls == before) is (shape in captured), step


@pytest.mark.skipif(not IS_INTERPRETED, reason="a device that computes is not lost")
def test_a_device_that_is_lost_in_a_capture_ends_the_engine() -> None:
    model = small_model()
    replayed, _ = graphs_over(model, small_pool(model))
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="an illegal memory access"):
        replayed.capture_by(Failing(lambda shape: True, lost), lambda share: None)
    with pytest.raises(ValueError, match="a bug"):
        replayed.capture_by(Failing(lambda shape: True, ValueError("a bug")), lambda share: None)


def test_sizes_end_with_one_that_all_sequences_fit_into() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 4]
    for most in (4, 5, 33, 256, 300):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-2] < most <= sizes[-1]


@pytest.mark.parametrize("max_num_seqs", [1, 5, 16, 100, 256, 300])
@pytest.mark.parametrize("max_num_tokens", [20, 100, 512, 8192])
def test_every_mixed_step_has_the_next_larger_shape(max_num_seqs: int, max_num_tokens: int) -> None:
    shapes = mixed_shapes(max_num_seqs, max_num_tokens)
    for tokens in range(1, min(max_num_tokens, 512) + 1, 7):
        for decodes in {0, 1, max_num_seqs // 2, max_num_seqs}:
            if decodes >= tokens:
                continue
            fitting = [s for s in shapes if s.tokens >= tokens and s.decodes >= decodes]
            assert fitting, (tokens, decodes)
            assert min(fitting).tokens == min(s.tokens for s in shapes if s.tokens >= tokens)
    assert all(shape.decodes <= shape.tokens for shape in shapes)
    assert GraphShape(32, 0, 16) in shapes


def test_prompts_are_replayed_up_to_where_launches_bind() -> None:
    # The numbers in a layer's products: SmolLM2-135M, Qwen3-0.6B, Qwen3-1.7B, Qwen3-8B.
    layers = (3_538_944, 15_728_640, 50_331_648, 192_937_984)
    assert [launch_bound_tokens(size) for size in layers] == [4096, 1024, 512, 512]
    model = small_model()
    pool = small_pool(model)
    assert CudaStack(model, pool).layer_weights == 96 * 320 + 192 * 96 + 96 * 288 + 144 * 96
    replayed, _ = graphs_over(model, pool, max_num_tokens=2048)
    assert shape_of(replayed, (1, 511)) == GraphShape(512, 4, 16)
    assert shape_of(replayed, (513,)) == GraphShape(768, 0, 64)
    assert shape_of(replayed, (1, 700)) == GraphShape(768, 4, 64)
    assert shape_of(replayed, (2048,)) == GraphShape(2048, 0, 64)
    assert shape_of(replayed, (4,) * 17) == GraphShape(768, 0, 64), "chunks of many prompts"
    assert shape_of(replayed, (4,) * 65) is None
    assert shape_of(replayed, (2049,)) is None
    only_decodes, _ = graphs_over(model, pool, max_num_tokens=0)
    assert shape_of(only_decodes, (4,)) is None
    assert shape_of(only_decodes, (1,)) == GraphShape(1, 1)


@IN_THE_INTERPRETER
def test_a_large_step_is_replayed_in_the_launches_of_a_small_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.support.graph_double import GraphDouble

    # Fewer tokens than in use: the interpreter takes two minutes for 768.
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    monkeypatch.setattr(graphs, "_LARGE_TOKENS", (40,))
    model = small_model()
    pools = [small_pool(model) for _ in range(2)]
    stack = CudaStack(model, pools[1])
    step = [(7, 1), (3, 1), *[(0, 2)] * 18]  # more chunks than a small shape has
    launches = []
    for max_num_tokens in (32, 40):
        replayed, inner = graphs_over(model, pools[0], max_num_tokens=max_num_tokens)
        double = GraphDouble()
        replayed.capture_by(double, lambda share: None, largest_only=True)
        launches.append(sorted(double.launches[0]))
    seen, expected = run_step(replayed, step), run_step(stack, step)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[0].storage, pools[1].storage, rtol=1e-4, atol=1e-4)
    assert inner.num_calls == 0, "a small shape has no room for the chunks"
    assert launches[0] == launches[1]


@IN_THE_INTERPRETER
def test_a_step_has_as_many_launches_as_its_layers_take() -> None:
    from tests.support.graph_double import GraphDouble

    # With fill_step, for the 28 layers of Qwen3-0.6B: 287 launches, and 203 by fused products.
    layer = [
        *("add_norm_kernel", "linear", "rotate_and_store_kernel", "attention", "merge_parts"),
        *("linear", "add_norm_kernel", "linear", "gate_kernel", "linear"),
    ]
    fused_layer = [
        *("gemv_kernel", "rotate_and_store_kernel", "attention", "merge_parts"),
        *("gemv_kernel", "gemv_kernel", "gemv_kernel"),
    ]
    plan = "plan_attention"
    for num_layers in (1, 2):
        model = small_model(num_layers)
        replayed, _ = graphs_over(model, small_pool(model), max_num_seqs=1, max_num_tokens=1)
        double = GraphDouble()
        replayed.capture_by(double, lambda share: None, largest_only=True)
        mixed, decode, fused, best = map(sorted, double.launches)
        ends = ["embedding", plan, "add_norm_kernel"]
        assert decode == sorted([*ends, *layer * num_layers])
        assert fused == sorted([*ends, *fused_layer * num_layers])
        assert best == ["linear", "logits_scan", "sample_finalize"]
        # Chunks are attended apart from decodes.
        apart = ["attention", "merge_parts"]
        assert mixed == sorted([*ends, plan, *(layer + apart) * num_layers])


@IN_THE_INTERPRETER
def test_the_double_overwrites_what_other_graphs_allocated() -> None:
    from tests.support.graph_double import GraphDouble

    double, buffer = GraphDouble(), torch.ones(4)
    tokens, logits = double(lambda: buffer.long() + 1), double(lambda: buffer * 3)
    result = tokens()
    assert result.tolist() == [2] * 4
    assert logits().tolist() == [3.0] * 4
    assert result.lt(0).all(), "the memory of an earlier graph is another one's"
    assert buffer.tolist() == [1.0] * 4
    assert tokens().tolist() == [2] * 4


@IN_THE_INTERPRETER
def test_the_double_is_as_strict_as_a_graph() -> None:
    from tests.support.graph_double import GraphDouble, NotCapturable

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
        for is_inference in (False, True):
            with torch.inference_mode(is_inference), pytest.raises(NotCapturable):
                GraphDouble()(read_by_the_host)
