"""Sums and gathering between ranks, here threads over the same sockets as processes have."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from worker.model.parallel.mesh import SMALL_BYTES, Mesh, RankGone
from worker.model.parallel.processes import AREA_BYTES, shared_memory, socket_pairs


def of_all(size: int, work: Callable[[int, Mesh], Tensor]) -> list[Tensor]:
    """The result of each rank, all at once."""
    ends, memory_fd = socket_pairs(size), shared_memory(size)
    with ThreadPoolExecutor(size) as pool:
        try:
            meshes = [Mesh(rank, ends[rank], memory_fd) for rank in range(size)]
            return list(pool.map(work, range(size), meshes, timeout=30))
        finally:
            os.close(memory_fd)
            for peers in ends.values():
                for peer in peers.values():
                    peer.close()


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(1, 3), (4, SMALL_BYTES // 16), (3, SMALL_BYTES // 2), (3, AREA_BYTES)],
    ids=["smallest", "over sockets", "over memory", "in pieces"],
)
def test_sums_are_the_same_bits_at_all_ranks(
    size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def work(rank: int, mesh: Mesh) -> Tensor:
        x = part(rank, shape, dtype)
        for _ in range(2):
            mesh.sum(x)
        return x

    expected = part(0, shape, dtype)
    for rank in range(1, size):
        expected = expected + part(rank, shape, dtype)
    once, expected = expected, expected.clone()
    for _ in range(1, size):
        expected = expected + once
    for found in of_all(size, work):
        assert torch.equal(found, expected)


def test_parts_are_gathered_at_rank_0() -> None:
    shape = (3, AREA_BYTES // 10)  # in pieces, the last one shorter
    first, *others = of_all(
        3, lambda rank, mesh: _cat(mesh.gather(part(rank, shape, torch.float32)))
    )
    assert torch.equal(first, torch.cat([part(rank, shape, torch.float32) for rank in range(3)]))
    assert [len(other) for other in others] == [0, 0]


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def test_a_rank_that_is_gone_is_an_error_and_no_wait() -> None:
    ends, memory_fd = socket_pairs(2), shared_memory(2)
    mesh = Mesh(0, ends[0], memory_fd)
    os.close(memory_fd)
    ends[1][0].close()
    for size in (4, SMALL_BYTES):
        with pytest.raises(RankGone):
            mesh.sum(torch.ones(size))
    ends[0][1].close()
