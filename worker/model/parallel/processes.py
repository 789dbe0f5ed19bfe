"""RankProcesses: the processes of ranks 1 and up, with their sockets and shared memory.

Imports no torch: rank 0 starts them before it imports its own, which takes them as long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from shared.cores import default_threads, share_of_cores
from worker.engine_options import EngineOptions

AREA_BYTES = 1 << 20  # of shared memory; a rank has two, in turns


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank. It waits for a StartRank at the other end of the `connection`."""

    number: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    connection: Connection  # over the same socket
    peer_fds: Mapping[int, int]  # its own: of its sockets to the other ranks


class RankProcesses:
    """The processes, and rank 0's ends: `store_fd` of the file through which the ranks find each
    other, `memory_fd` of what all map, `peers` the sockets by the rank at the other end."""

    def __init__(self, options: EngineOptions) -> None:
        """Starts them. Linux only."""
        size = options.tensor_parallel_size
        self.store_fd = new_store()
        self.memory_fd = shared_memory(size)
        self.peers, *others = socket_pairs(size).values()
        self.ranks = [
            self._start(number, rank_threads(options, number), peers)
            for number, peers in enumerate(others, start=1)
        ]

    def _start(
        self, number: int, num_threads: int, peers: Mapping[int, socket.socket]
    ) -> RankProcess:
        own, other = socket.socketpair()
        peer_fds = {rank: peer.fileno() for rank, peer in peers.items()}
        shared_fds = (self.store_fd, self.memory_fd)
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        with other:
            process = subprocess.Popen(
                (
                    sys.executable,
                    "-m",
                    "worker.model.rank",
                    str(other.fileno()),
                    str(os.getpid()),
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(), *shared_fds, *peer_fds.values()),
                env=os.environ | threads,
            )
        for peer in peers.values():
            peer.close()
        return RankProcess(number, process, own, Connection(os.dup(own.fileno())), peer_fds)


def rank_threads(options: EngineOptions, rank: int) -> int:
    """Returns the CPU threads of a rank."""
    num_threads = options.num_threads or default_threads()
    return share_of_cores(num_threads, options.tensor_parallel_size, rank)


def new_store() -> int:
    """Returns the descriptor of a file in memory, for worker.model.parallel.joining. It has no
    name, so it ends with the last process that has it open."""
    return os.memfd_create("ranks")


def memory_bytes(size: int) -> int:
    """Returns the size of the memory that `size` ranks share."""
    return 2 * size * AREA_BYTES


def shared_memory(size: int) -> int:
    """Returns the descriptor of the memory that `size` ranks share, without a name as well."""
    fd = os.memfd_create("sums")
    os.ftruncate(fd, memory_bytes(size))
    return fd


def socket_pairs(size: int) -> dict[int, dict[int, socket.socket]]:
    """Returns, for each of `size` ranks, its sockets by the rank at the other end."""
    ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(size)}
    for one in range(size):
        for other in range(one + 1, size):
            ends[one][other], ends[other][one] = socket.socketpair()
    return ends
