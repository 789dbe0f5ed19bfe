"""Ranks: starts, feeds and watches the processes of ranks 1 and up, for rank 0.

Rank 0 schedules and samples; the others compute what it sends them (docs/adr/0047). They end with
it, whatever ends it. When one of them ends, or fails, no step can be computed any more: the others
wait in a collective that never ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import NoReturn

import torch
import torch.distributed as dist

from shared.cores import default_threads
from worker.engine.batch import ScheduledBatch
from worker.engine.errors import EngineFailed
from worker.engine_options import EngineOptions
from worker.model.errors import ModelError
from worker.model.parallel.group import ALONE
from worker.model.parallel.joining import check_machine, join, rank_device
from worker.model.parallel.messages import (
    FromRank,
    RankFailed,
    RankLoaded,
    RankLog,
    RankStarted,
    StartRank,
    StepEncoder,
    decode_from_rank,
    encode,
)
from worker.model.parallel.processes import RankProcess, RankProcesses

Progress = Callable[[str, float], None]

_EXIT_WAIT_S = 1.0
# In which the thread that computes can notice a rank's end by itself, before the process is ended.
_NOTICE_S = 2.0

log = logging.getLogger(__name__)


class RanksLost(EngineFailed):
    """A rank has ended, or the ranks are out of step."""


class Ranks:
    """Ranks 1 and up. Threads: one computes, `_watch` runs in another."""

    def __init__(
        self,
        options: EngineOptions,
        processes: RankProcesses,
        on_end: Callable[[str], None] | None,
        report: Progress,
    ) -> None:
        """Starts loading in the processes. `on_end` gets a sentence when a rank has ended, in any
        thread, and must end this process: NCCL waits forever. Without it the next step raises
        RanksLost. `report` becomes the attribute, with a `check` before each call."""
        self._on_end = on_end
        self.group = ALONE  # until `join`
        self.report = self._watched(report)
        self._encoder = StepEncoder()
        self._changed = threading.Condition()
        self._failure: RankFailed | None = None
        self._is_closed = False
        self.num_bytes_sent = 0  # of all steps, to each rank
        self._processes = processes
        self._ranks = processes.ranks
        self._progress: dict[int, type[RankStarted | RankLoaded]] = {}  # by rank
        level = logging.getLogger().getEffectiveLevel()
        for rank in self._ranks:
            fds = (processes.store_fd, dict(rank.peer_fds), processes.memory_fd)
            with contextlib.suppress(OSError):  # it has ended already, which _watch sees
                rank.connection.send_bytes(encode(StartRank(options, rank.number, *fds, level)))
        atexit.register(self.close)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def join(self, device: torch.device) -> None:
        """Joins the group as rank 0, when all others are about to. Raises as `check` does."""
        device = rank_device(device, 0)
        self._wait_for(RankStarted)
        there = self._processes
        size = 1 + len(self._ranks)
        self.group = join(0, size, there.store_fd, device, there.peers, there.memory_fd)

    def loaded(self) -> None:
        """Waits until all ranks have loaded their parts. Raises as `check` does."""
        self._wait_for(RankLoaded)
        os.close(self._processes.store_fd)
        os.close(self._processes.memory_fd)

    def check(self) -> None:
        """Raises ModelError when a rank could not load its part, RanksLost when one has ended."""
        failure = self._failure
        if failure is not None:
            raise (ModelError if failure.by_settings else RanksLost)(failure.message)

    def _watched(self, report: Progress) -> Progress:
        """Returns `report` with a `check` before each call."""

        def checked(stage: str, share: float) -> None:
            self.check()
            report(stage, share)

        return checked

    def explain(self, error: Exception) -> None:
        """Ends the processes after an error of loading; raises as `check` does where a rank's
        failure has caused it."""
        if not isinstance(error, ModelError | RanksLost):
            self._wait_for_failure()
        self.close()
        self.check()

    def send(self, batch: ScheduledBatch) -> None:
        """Sends a step, which the others begin to compute. Raises RanksLost."""
        body = encode(self._encoder.encode(batch))
        self.num_bytes_sent += len(body)
        try:
            for rank in self._ranks:
                rank.connection.send_bytes(body)
        except OSError as error:
            self.lost(error)

    def lost(self, error: Exception) -> NoReturn:
        """Ends the engine after an exception in a step that the ranks compute together.

        They cannot be brought into step again: some may wait in a collective. Raises RanksLost
        where this process is not ended.
        """
        failure = self._wait_for_failure()
        sentence = f"a step failed at rank 0: {type(error).__name__}: {error}"
        self._end(failure.message if failure is not None else sentence)
        raise RanksLost(failure.message if failure is not None else sentence) from error

    def close(self) -> None:
        """Ends the processes and the group. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended already
                rank.socket.shutdown(socket.SHUT_RDWR)
        for rank in self._ranks:
            try:
                rank.process.wait(_EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_EXIT_WAIT_S)  # it sees the ends of the connections
        for rank in self._ranks:
            rank.connection.close()
            rank.socket.close()
        for peer in self._processes.peers.values():
            peer.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for(self, progress: type[RankStarted | RankLoaded]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or all(self._progress.get(r.number) is progress for r in self._ranks)
                )
            )
        self.check()

    def _wait_for_failure(self) -> RankFailed | None:
        """Returns what ended a rank, after an error that its end may have caused."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _NOTICE_S)
        return self._failure

    def _watch(self) -> None:
        open_ranks = {rank.connection: rank for rank in self._ranks}
        while open_ranks and not self._is_closed:
            for connection in wait(list(open_ranks)):
                rank = open_ranks[connection]  # type: ignore[index]
                try:
                    self._take(rank, decode_from_rank(rank.connection.recv_bytes()))
                except (EOFError, OSError):
                    del open_ranks[rank.connection]
                    if not self._is_closed:
                        self._ended(rank)

    def _take(self, rank: RankProcess, message: FromRank) -> None:
        match message:
            case RankLog():
                record = logging.getLogger(message.logger)
                record.log(message.level, message.message, extra={"rank": rank.number})
            case RankFailed():
                self._fail(message)
            case _:
                with self._changed:
                    self._progress[rank.number] = type(message)
                    self._changed.notify_all()

    def _ended(self, rank: RankProcess) -> None:
        try:
            status: int | str = rank.process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            status = "unknown"
        sentence = f"rank {rank.number} of the model has ended with status {status}"
        self._fail(RankFailed(sentence, by_settings=False))
        if self._on_end is not None:
            time.sleep(_NOTICE_S)  # an engine that loads reports the reason by itself
            if not self._is_closed:
                self._end(sentence)

    def _fail(self, failure: RankFailed) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _end(self, sentence: str) -> None:
        if self._on_end is not None:
            self._on_end(sentence)


def start_ranks(
    options: EngineOptions,
    device: torch.device,
    processes: RankProcesses | None,
    on_end: Callable[[str], None] | None,
    report: Progress,
) -> Ranks:
    """Starts loading ranks 1 and up of `options`, in new processes where none are given, and joins
    their group.

    Raises ModelError where this machine cannot run them, or one of them cannot load its part.
    """
    check_machine(options, device)
    # Before the parts are made of it: a rank's own environment has its part alone.
    num_threads = options.num_threads or default_threads()
    options = replace(options, num_threads=num_threads)
    ranks = Ranks(options, processes or RankProcesses(options), on_end, report)
    try:
        report("starting ranks", 0.0)
        ranks.join(device)
        report("starting ranks", 1.0)
    except Exception as error:
        ranks.explain(error)
        raise
    return ranks
