"""Attention is divided evenly, whatever the lengths are, and its bits can be the same in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton, multiply_in_order

if not has_triton():
    pytest.skip(NO_TRITON, allow_module_level=True)

from worker.model.attention.sdpa import SdpaAttention
from worker.model.base import AttentionMetadata, KVLayer, LayerScores, Reach
from worker.model.cuda import attention
from worker.model.cuda.attention import Tiles, TritonAttention, chunk_tiles, decode_tiles
from worker.model.cuda.graphs import mixed_shapes
from worker.model.cuda.kernels.attention_plan import PROGRAM_FIELDS, UNIT_FIELDS
from worker.model.cuda.step_buffers import GraphShape, StepBuffers
from worker.model.kv_cache import KVCachePool

pytestmark = pytest.mark.triton
BLOCK_SIZE = 16
# (tokens in the cache, tokens of this step) of a sequence
Shape = Sequence[tuple[int, int]]
UNEVEN = [(32_767, 1)] + [(511, 1)] * 255


@dataclass(frozen=True)
class Layers:
    kv_layers: tuple[KVLayer, ...]


def new_pool(num_blocks: int, kv_heads: int, dim: int, dtype: torch.dtype) -> KVCachePool:
    layers = Layers((KVLayer(kv_heads, dim, dim),))
    pool = KVCachePool(layers, num_blocks, BLOCK_SIZE, device=torch_device(), dtype=dtype)
    pool.storage.normal_(generator=torch.Generator(torch_device()).manual_seed(3))
    return pool


def metadata(shape: Shape, tables: Sequence[Sequence[int]] | None = None) -> AttentionMetadata:
    """Returns that of a step; without `tables` every sequence has the pool's first blocks."""
    ends = np.cumsum([0] + [new for _, new in shape])
    lengths = [past + new for past, new in shape]
    width = -(-max(lengths) // BLOCK_SIZE)
    rows = [list(range(width))] * len(shape) if tables is None else tables

    def on_device(numbers: object) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=torch_device())

    return AttentionMetadata(
        cu_q=on_device(ends.tolist()),
        seq_lens=on_device(lengths),
        block_tables=on_device([[list(row[:width]) for row in rows]]),
        slots=on_device([[-1] * int(ends[-1])]),
        num_decodes=[new for _, new in shape].count(1),
        max_query_len=max(new for _, new in shape),
        num_tokens=int(ends[-1]),
        query_lens=tuple(new for _, new in shape),
        context_lens=tuple(lengths),
    )


def divided(
    shape: Shape, tiles: Tiles, *, processors: int, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns where the programs' pieces begin and end, the plan of programs, and of units."""
    monkeypatch.setattr(attention, "_num_processors", lambda device: processors)
    pool = new_pool(1, 2, 16, torch.float32)
    backend = TritonAttention(pool, [LayerScores(reach=reach)])
    backend.prepare(metadata(shape, [[0]] * len(shape)))
    decodes = [new for _, new in shape].count(1)
    rows = attention._Rows(0, decodes, 0)
    if decodes < len(shape):
        rows = attention._Rows(decodes, 0, len(shape) - decodes)
    num_programs = processors * tiles.programs
    plan = backend._plan(backend._layers[0], tiles, 4, rows, num_programs, 2 * num_programs)
    programs = plan.programs.view(PROGRAM_FIELDS, -1).cpu().numpy()
    return programs[0].tolist(), programs, plan.units.view(UNIT_FIELDS, -1).cpu().numpy()


def random_shapes() -> list[Shape]:
    rng = np.random.default_rng(5)
    shapes: list[Shape] = [UNEVEN, [(131_000, 1)], [(511, 1)] * 256, [(32_768, 16)], [(0, 8192)]]
    for _ in range(6):
        lengths = np.exp(rng.uniform(0, 11, rng.integers(1, 300))).astype(int)
        shapes.append([(int(length), 1) for length in lengths])
        counts = rng.integers(2, 700, rng.integers(1, 20))
        shapes.append([(int(past), int(new)) for past, new in zip(lengths, counts, strict=False)])
    return shapes


@pytest.mark.parametrize("reach", [Reach(), Reach(window=1000), Reach(chunk=4096)], ids=str)
def test_no_program_has_much_more_than_its_share(
    reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in random_shapes():
        choose = decode_tiles if shape[0][1] == 1 else chunk_tiles
        tiles = choose(4, 128, torch.bfloat16)
        bounds, programs, units = divided(
            shape, tiles, processors=132, reach=reach, monkeypatch=monkeypatch
        )
        # All keys that a query of a tile attends to are some program's, for both key heads.
        expected = 0
        tokens = tiles.rows // 4
        for past, new in shape:
            for first in range(past, past + new, tokens):
                end = min(first + tokens, past + new)
                expected += -(-end // tiles.keys) - reach.first(first) // tiles.keys
        assert bounds[0] == 0
        assert bounds[-1] == 2 * expected, shape
        shares = np.diff(bounds)
        assert shares.min() >= 0
        even = -(-bounds[-1] // len(shares))
        assert shares.max() <= 1.07 * even, (shape[:3], shares.max(), even)
        # A unit that is cut has a slot for each of its programs.
        starts = units[5]
        cut = [
            bound
            for bound, unit in zip(bounds[1:-1], programs[1, 1:-1], strict=True)
            if bound % expected != starts[unit] and bound < bounds[-1]
        ]
        parts = programs[3, :-1]
        assert parts.sum() == len(cut) + np.count_nonzero(parts)
        assert parts.sum() <= 2 * len(shares)


@pytest.mark.parametrize("processors", [1, 40])
@pytest.mark.parametrize(
    "scores",
    [LayerScores(), LayerScores(scale=0.3, softcap=2.0, reach=Reach(window=90))],
    ids=["plain", "window-softcap"],
)
def test_random_lengths_equal_torchs_operators(
    processors: int, scores: LayerScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_processors", lambda device: processors)
    if processors > 1:  # chunks are divided as well
        monkeypatch.setattr(attention, "_MERGED_KEYS", -(1 << 20))
    rng = np.random.default_rng(processors)
    shape = [(int(past), 1) for past in rng.integers(0, 700, 5)]
    shape += [(int(past), int(new)) for past, new in rng.integers(2, 150, (3, 2))]
    pool = new_pool(64, 2, 16, torch.float32)
    step = metadata(shape)
    q = torch.randn(step.num_tokens, 6, 16, device=torch_device())
    sinks = torch.randn(6, device=torch_device())
    outs = []
    for backend in (TritonAttention(pool, [scores]), SdpaAttention(pool, [scores])):
        backend.prepare(step)
        outs.append(torch.full_like(q, torch.nan))
        if isinstance(backend, SdpaAttention):
            expected_of(backend, pool, step, q, outs[-1], sinks)
        else:
            backend.attend(0, q, outs[-1], sinks)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


def expected_of(
    backend: SdpaAttention,
    pool: KVCachePool,
    step: AttentionMetadata,
    q: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor,
) -> None:
    """Attends by torch's operators, to which the step's own keys are given: those of the pool."""
    places = torch.cat(
        [
            torch.arange(length - new, length)
            for length, new in zip(step.context_lens, step.query_lens, strict=True)
        ]
    ).to(torch_device())
    blocks, offsets = places // BLOCK_SIZE, places % BLOCK_SIZE
    backend.prepare(
        AttentionMetadata(
            **{
                name: getattr(step, name)
                for name in AttentionMetadata.__slots__
                if name not in ("slots",)
            },
            slots=(blocks * BLOCK_SIZE + offsets).int()[None],
        )
    )
    backend.store(0, pool.keys[0][blocks, offsets].clone(), pool.values[0][blocks, offsets].clone())
    backend.attend(0, q, out, sinks)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([(0, 512)], True),
        ([(0, 8192)], True),
        ([(511, 1), (0, 2048)], True),
        ([(8192, 16)], False),
        ([(131_072, 16), (0, 512)], False),
    ],
)
def test_whole_prompts_are_not_divided_by_their_keys(
    shape: Shape, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_processors", lambda device: 132)
    backend = TritonAttention(new_pool(1, 8, 16, torch.float32))
    tiles = chunk_tiles(4, 128, torch.bfloat16)
    step = metadata(shape, [[0]] * len(shape))
    assert backend._is_even(backend._layers[0], step, tiles, 4) is expected


def test_chunks_in_a_graph_are_divided_whatever_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_num_processors", lambda device: 132)
    backend = TritonAttention(new_pool(1, 8, 16, torch.float32))
    tiles = chunk_tiles(4, 128, torch.bfloat16)
    buffers = new_buffers(512, 512 + 16)
    for shape in mixed_shapes(256, 8192):
        step = buffers.metadata(shape)
        assert not backend._is_even(backend._layers[0], step, tiles, 4), shape


def new_buffers(num_tokens: int, num_seqs: int) -> StepBuffers:
    return StepBuffers.zeros(num_tokens, num_seqs, 64, 1, 8, torch.float32, torch_device())


@pytest.mark.skipif(not IS_INTERPRETED, reason="a device runs programs in an order of its own")
@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_padded_decode_of_a_graph_writes_no_row_of_a_chunk(
    is_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(attention, "_num_processors", lambda device: 4)
    multiply_in_order(monkeypatch)
    pool = new_pool(40, 2, 16, torch.float32)
    # Three decodes and a prompt of 20, whose tokens begin at the fourth row; room for 16 decodes.
    step = new_buffers(32, 32).metadata(GraphShape(32, 16, 16))
    step.seq_lens[:3], step.seq_lens[16] = 600, 20
    step.cu_q.fill_(23)
    step.cu_q[:3], step.cu_q[16] = torch.arange(3), 3
    step.block_tables[0, :, :38] = torch.arange(38)
    q = torch.randn(32, 8, 16)
    set_index, found = interpreter_builder.set_grid_idx, []

    def set_last_first(x: int, y: int, z: int) -> None:
        set_index(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    for order in (set_index, set_last_first):
        monkeypatch.setattr(interpreter_builder, "set_grid_idx", order)
        backend = TritonAttention(pool, is_invariant=is_invariant)
        backend.prepare(step)
        out = torch.full_like(q, torch.nan)
        backend.attend(0, q, out)
        found.append(out[:23])
    assert not found[0].isnan().any()
    assert torch.equal(*found)
    assert (found[0].abs().amax(dim=(1, 2)) > 0).all()


REACHES = [Reach(), Reach(window=150)]


def attended(
    pool: KVCachePool,
    shape: Shape,
    q: torch.Tensor,
    reach: Reach,
    tables: Sequence[Sequence[int]] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    backend = TritonAttention(pool, [LayerScores(reach=reach)], is_invariant=True)
    backend.prepare(metadata(shape, tables))
    out = torch.full_like(q, torch.nan)
    backend.attend(0, q, out, sinks)
    return out


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_INVARIANT_KEYS", 64)
    multiply_in_order(monkeypatch)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("reach", REACHES, ids=["all", "window"])
def test_an_invariant_row_has_the_same_bits_alone_and_among_others(
    reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = new_pool(30, 2, 64, torch.bfloat16)
    q = torch.randn(21, 8, 64, device=torch_device()).bfloat16()
    sinks = torch.randn(8, device=torch_device()).bfloat16()
    shape: list[tuple[int, int]] = [(399, 1)] + [(17 * n % 300, 1) for n in range(17)] + [(20, 3)]
    alone = attended(pool, shape[:1], q[:1], reach, sinks=sinks)
    seen = attended(pool, shape, q, reach, sinks=sinks)
    assert torch.equal(seen[0], alone[0])
    for processors, kept_steps in ((1, 8), (20, 8), (20, 0), (3, 1)):
        monkeypatch.setattr(attention, "_num_processors", lambda device, n=processors: n)
        monkeypatch.setattr(attention, "_KEPT_STEPS", kept_steps)
        again = attended(pool, shape, q, reach, sinks=sinks)
        assert torch.equal(again, seen), (processors, kept_steps)


@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("reach", REACHES, ids=["all", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_invariant_prompt_has_the_bits_of_its_decodes(reach: Reach, dtype: torch.dtype) -> None:
    pool = new_pool(30, 2, 64, dtype)
    q = torch.randn(200, 8, 64, device=torch_device()).to(dtype)
    sinks = torch.randn(8, device=torch_device()).to(dtype)
    whole = attended(pool, [(0, 200)], q, reach, sinks=sinks)
    later = attended(pool, [(77, 123)], q[77:], reach, sinks=sinks)
    assert torch.equal(later, whole[77:])
    places = [1, 63, 64, 130, 199]
    decoded = attended(pool, [(place, 1) for place in places], q[places], reach, sinks=sinks)
    assert torch.equal(decoded, whole[places])


@pytest.mark.skipif(not IS_INTERPRETED, reason="what a device rounds may be equal")
def test_without_invariance_rows_may_depend_on_their_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the tests above do not hold by themselves."""
    pool = new_pool(30, 2, 64, torch.bfloat16)
    q = torch.randn(21, 8, 64, device=torch_device()).bfloat16()
    outs = []
    for shape in ([(399, 1)], [(399, 1)] + [(200, 1)] * 20):
        backend = TritonAttention(pool)
        backend.prepare(metadata(shape))
        outs.append(torch.empty_like(q[: len(shape)]))
        backend.attend(0, q[: len(shape)], outs[-1])
    assert not torch.equal(outs[0][0], outs[1][0])
