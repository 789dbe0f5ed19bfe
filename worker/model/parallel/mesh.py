"""Mesh: what ranks on one machine's CPUs send to one another, over a socket pair for every two.

A decode step has some fifty sums of a few KB. gloo hands each to threads of its own, which wait for
one another; here the thread that computes sends and receives, and waits in the kernel. A rank that
has ended is an end of file.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch
from torch import Tensor

# What the sockets hold without a reader. Larger sums are quicker over gloo, smaller ones slower.
SMALL_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 18


class RankGone(Exception):
    """Another rank has closed its end."""


class Mesh:
    """This rank's sockets, by the rank at the other end. For one thread."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        for peer in peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    @staticmethod
    def is_small(x: Tensor) -> bool:
        """Returns whether `sum` can add `x`: all send before any receives."""
        return x.numel() * x.element_size() <= SMALL_BYTES

    def sum(self, x: Tensor) -> None:
        """Adds all ranks' small `x`, contiguous, in x's memory: in the order of the ranks, so that
        all of them get the same bits. Raises RankGone."""
        for peer in self._peers.values():
            self._send(peer, x)
        theirs = {}
        for rank, peer in self._peers.items():
            theirs[rank] = torch.empty_like(x)
            self._receive(peer, theirs[rank])
        in_order = [theirs.get(rank, x) for rank in range(1 + len(theirs))]
        total = torch.add(in_order[0], in_order[1])
        for other in in_order[2:]:
            total += other
        x.copy_(total)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Returns all ranks' parts, contiguous and of one shape, at rank 0; nothing elsewhere.

        Raises RankGone.
        """
        if self._rank:
            self._send(self._peers[0], part)
            return []
        parts = [part]
        for peer in self._peers.values():
            parts.append(torch.empty_like(part))
            self._receive(peer, parts[-1])
        return parts

    @staticmethod
    def _send(peer: socket.socket, tensor: Tensor) -> None:
        try:
            peer.sendall(_bytes(tensor))
        except OSError as error:
            raise RankGone(str(error)) from error

    @staticmethod
    def _receive(peer: socket.socket, into: Tensor) -> None:
        view = _bytes(into)
        try:
            while len(view):
                count = peer.recv_into(view, 0, socket.MSG_WAITALL)
                if count == 0:
                    raise RankGone("another rank has closed its end")
                view = view[count:]
        except OSError as error:
            raise RankGone(str(error)) from error


def _bytes(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor [...]."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def socket_pairs(size: int) -> dict[int, dict[int, socket.socket]]:
    """Returns, for each of `size` ranks, its sockets by the rank at the other end."""
    ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(size)}
    for one in range(size):
        for other in range(one + 1, size):
            ends[one][other], ends[other][one] = socket.socketpair()
    return ends
