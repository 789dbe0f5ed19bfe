"""Mesh: sums and gathers of CPU ranks over shared memory and one socket pair per pair of ranks.

A decode step has some fifty sums of a few KB. gloo hands each to threads of its own, which wait for
one another; here the thread that computes writes, and signals it with a byte. It polls the others'
bytes for a moment, as they are about to come, and then waits in the kernel. A rank that has ended
is an end of file.
"""

from __future__ import annotations

import mmap
import socket
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from worker.model.parallel.processes import AREA_BYTES, memory_bytes

# What goes through the sockets themselves, which hold as much without a reader.
SMALL_BYTES = 16 << 10
_BUFFER_BYTES = 1 << 18
# Being woken takes as long or longer. On a machine with more to do than cores it is lost.
_ASKING_S = 1e-4
_HERE = b"\1"


class RankGone(Exception):
    """Another rank has closed its end."""


class Mesh:
    """This rank's sockets, by the rank at the other end, and the memory of all. For one thread.

    All ranks call the same methods in the same order with tensors of one shape.
    """

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory_fd: int) -> None:
        """`memory_fd` is what `shared_memory` returned; it may be closed afterwards."""
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        for peer in peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        size = 1 + len(peers)
        mapped = mmap.mmap(memory_fd, memory_bytes(size))
        memory = torch.frombuffer(mapped, dtype=torch.uint8).view(2, size, AREA_BYTES)
        self._areas = tuple(memory.unbind())  # by turn: [ranks, bytes]
        self._turn = 0

    def sum(self, x: Tensor) -> None:
        """Adds all ranks' `x`, contiguous, in x's memory: in the order of the ranks, so that all of
        them get the same bits. Raises RankGone."""
        if x.numel() * x.element_size() <= SMALL_BYTES:
            self._sum_small(x)
            return
        for piece in _pieces(x):
            area = self._exchange(piece)
            total = torch.add(area[0], area[1], out=piece)
            for other in area[2:]:
                total += other

    def gather(self, part: Tensor) -> list[Tensor]:
        """Returns all ranks' parts, contiguous and of one shape, at rank 0; nothing elsewhere.

        Raises RankGone.
        """
        size = 1 + len(self._peers)
        parts = [] if self._rank else [torch.empty_like(part) for _ in range(size)]
        pieces = [_pieces(one) for one in parts]
        for number, piece in enumerate(_pieces(part)):
            area = self._exchange(piece)
            for rank, into in enumerate(pieces):  # at rank 0 alone there are any
                into[number].copy_(area[rank])
        return parts

    def _sum_small(self, x: Tensor) -> None:
        for peer in self._peers.values():
            _send(peer, _bytes(x))
        theirs = {}
        for rank, peer in self._peers.items():
            theirs[rank] = torch.empty_like(x)
            _receive(peer, _bytes(theirs[rank]))
        in_order = [theirs.get(rank, x) for rank in range(1 + len(theirs))]
        total = torch.add(in_order[0], in_order[1])
        for other in in_order[2:]:
            total += other
        x.copy_(total)

    def _exchange(self, piece: Tensor) -> Tensor:
        """Returns all ranks' pieces, [ranks, size of `piece`], valid until the next call but one.

        A rank that has announced its next chunk has read this one: with two areas in turns
        no rank overwrites data that another still reads.
        """
        area = self._areas[self._turn].view(piece.dtype)[:, : len(piece)]
        self._turn ^= 1
        area[self._rank].copy_(piece)
        for peer in self._peers.values():
            _send(peer, memoryview(_HERE))
        here = memoryview(bytearray(1))
        for peer in self._peers.values():
            _receive(peer, here)
        return area


def _send(peer: socket.socket, content: memoryview) -> None:
    try:
        peer.sendall(content)
    except OSError as error:
        raise RankGone(str(error)) from error


def _receive(peer: socket.socket, into: memoryview) -> None:
    give_up_s = time.perf_counter() + _ASKING_S
    flags = socket.MSG_DONTWAIT
    while len(into):
        try:
            count = peer.recv_into(into, 0, flags)
        except BlockingIOError:
            if time.perf_counter() > give_up_s:
                flags = socket.MSG_WAITALL
            continue
        except OSError as error:
            raise RankGone(str(error)) from error
        if count == 0:
            raise RankGone("another rank has closed its end")
        into = into[count:]


def _pieces(tensor: Tensor) -> list[Tensor]:
    """Returns a contiguous tensor [...] in parts, each as long as an area has room for, [n]."""
    flat, length = tensor.view(-1), AREA_BYTES // tensor.element_size()
    return [flat[start : start + length] for start in range(0, len(flat), length)]


def _bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor [...]."""
    return tensor.view(-1).view(torch.uint8).numpy().data
