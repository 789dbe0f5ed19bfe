"""Runs a rank above 0: `python -m worker.model.rank <fd> <parent pid>`.

It loads its part of the model and computes the steps that rank 0 sends, until rank 0 closes the
connection or dies. It schedules and samples nothing. Exit status: 0 when rank 0 is gone, 1 when its
part cannot be loaded (RankFailed is sent before), 70 after an exception in a step.
"""

from __future__ import annotations

import logging
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from shared.huge_pages import collapse_heap
from worker.model.build import choose_source, load_part
from worker.model.device import choose_device
from worker.model.errors import ModelError, is_transient
from worker.model.parallel.joining import join, rank_device
from worker.model.parallel.messages import (
    FromRank,
    RankFailed,
    RankLoaded,
    RankLog,
    RankStarted,
    StartRank,
    StepDecoder,
    decode_start,
    decode_step,
    encode,
)
from worker.model.step.rank_forward import RankForward

EXIT_NOT_LOADED = 1
EXIT_UNEXPECTED = 70

log = logging.getLogger(__name__)


class RankSocket:
    """This rank's end of the connection to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        """Waits for the next message. Raises EOFError or OSError when rank 0 is gone."""
        return self._connection.recv_bytes()

    def send(self, message: FromRank) -> None:
        """Sends a message. Raises OSError when rank 0 is gone."""
        self._connection.send_bytes(encode(message))


class RankLogHandler(logging.Handler):
    """Has rank 0 write this rank's log."""

    def __init__(self, link: RankSocket) -> None:
        super().__init__()
        self._link = link
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._link.send(RankLog(record.name, record.levelno, self.format(record)))
        except OSError:
            self.handleError(record)


def main(fd: int) -> int:
    """Runs a rank for rank 0 at the other end of the connection; returns the exit status."""
    link = RankSocket(Connection(fd))
    try:
        start = decode_start(link.receive())
        root = logging.getLogger()
        root.setLevel(start.log_level)
        root.addHandler(RankLogHandler(link))
        return _serve(start, link)
    except (EOFError, OSError):
        return 0


def _serve(start: StartRank, link: RankSocket) -> int:
    try:
        device = rank_device(choose_device(start.options.device), start.rank)
        link.send(RankStarted())
        peers = {rank: socket.socket(fileno=fd) for rank, fd in start.peer_fds.items()}
        size = start.options.tensor_parallel_size
        group = join(start.rank, size, start.store_fd, device, peers, start.memory_fd)
        source = choose_source(start.options.model_impl, Path(start.options.checkpoint))
        part = load_part(start.options, source, device, group, lambda stage, share: None)
    except (ModelError, ValueError) as error:
        link.send(RankFailed(str(error), by_settings=not is_transient(error)))
        return EXIT_NOT_LOADED
    except Exception as error:
        log.error("rank %d could not load its part of the model", start.rank, exc_info=True)
        sentence = f"rank {start.rank}: {type(error).__name__}: {error}"
        link.send(RankFailed(sentence, by_settings=False))
        return EXIT_NOT_LOADED
    collapse_heap()
    link.send(RankLoaded())
    decoder = StepDecoder()
    forward = RankForward(
        part.built.model,
        part.kv_cache.stack,
        block_size=part.kv_cache.block_size,
        max_num_seqs=start.options.max_num_seqs,
        shares_tokens=part.lookahead > 0,
        num_kv_groups=len(part.kv_cache.windows),
        host_blocks=part.kv_cache.host_blocks,
    )
    while True:
        step = decode_step(link.receive())
        try:
            forward.run(decoder.decode(step), step.sampled)
        except Exception as error:
            sentence = f"a step failed at rank {start.rank}: {type(error).__name__}: {error}"
            link.send(RankFailed(sentence, by_settings=False))
            return EXIT_UNEXPECTED
