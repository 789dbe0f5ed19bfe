"""Rank 1 as a process that stays: it joins once and takes its part of one model after another.

As worker.model.rank.follower does for the one model of its life; a start costs seconds here,
most of them for imports.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from shared.process import die_with_parent
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, choose_source, complete, load_part
from worker.model.parallel.group import RankGroup
from worker.model.parallel.joining import join
from worker.model.parallel.messages import StepDecoder, StepEncoder, decode_step, encode
from worker.model.parallel.processes import new_store, shared_memory, socket_pairs
from worker.model.step.rank_forward import RankForward

CPU = torch.device("cpu")
NO_MORE = b""  # after the last step of a model
_options = msgspec.msgpack.Decoder(EngineOptions)


class StandingRank:
    """Rank 0's end: the ranks of TorchModelRunner, for one model at a time."""

    def __init__(self, connection: Connection, group: RankGroup) -> None:
        self._connection = connection
        self._group = group
        self._encoder = StepEncoder()

    @contextmanager
    def built(self, options: EngineOptions) -> Iterator[BuiltModel]:
        """A model over both ranks. Raises ModelError as worker.model.build does at rank 0."""
        source = choose_source(options.model_impl, Path(options.checkpoint))
        source.check_divisible(options.tensor_parallel_size)
        self._encoder = StepEncoder()
        self._connection.send_bytes(encode(options))
        try:
            part = load_part(options, source, CPU, self._group, lambda stage, share: None)
            yield complete(options, source, part, None, self, lambda stage, share: None)
        finally:
            self._connection.send_bytes(NO_MORE)

    def send(self, batch: ScheduledBatch) -> None:
        self._connection.send_bytes(encode(self._encoder.encode(batch)))

    def lost(self, error: Exception) -> NoReturn:
        raise error

    def close(self) -> None:
        """The process stays."""


@contextmanager
def standing_rank() -> Iterator[StandingRank]:
    """Starts rank 1 and joins it; ends it."""
    mine, its = socket_pairs(2).values()
    own, other = socket.socketpair()
    store_fd, memory_fd = new_store(), shared_memory(2)
    fds = (other.fileno(), store_fd, its[0].fileno(), memory_fd)
    process = subprocess.Popen(
        (sys.executable, "-m", "tests.support.standing_ranks", *map(str, (os.getpid(), *fds))),
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    other.close()
    its[0].close()
    try:
        with Connection(own.detach()) as connection:
            yield StandingRank(connection, join(0, 2, store_fd, CPU, mine, memory_fd))
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(store_fd)
        os.close(memory_fd)
        mine[1].close()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(connection: Connection, store_fd: int, peer_fd: int, memory_fd: int) -> None:
    """Rank 1: loads what it is told to and computes its steps, until rank 0 is gone."""
    group = join(1, 2, store_fd, CPU, {0: socket.socket(fileno=peer_fd)}, memory_fd)
    while True:
        try:
            options = _options.decode(connection.recv_bytes())
        except EOFError:
            return
        source = choose_source(options.model_impl, Path(options.checkpoint))
        part = load_part(options, source, CPU, group, lambda stage, share: None)
        decoder = StepDecoder()
        forward = RankForward(
            part.built.model,
            part.kv_cache.stack,
            block_size=part.kv_cache.block_size,
            max_num_seqs=options.max_num_seqs,
            shares_tokens=part.lookahead > 0,
            num_kv_groups=len(part.kv_cache.windows),
        )
        while (body := connection.recv_bytes()) != NO_MORE:
            step = decode_step(body)
            forward.run(decoder.decode(step), step.sampled)


if __name__ == "__main__":
    parent, *rest = map(int, sys.argv[1:])
    die_with_parent(parent, signal.SIGKILL)
    main(Connection(rest[0]), *rest[1:])
    os._exit(0)
