"""The end of a child of vLLM's is told at once; none is told when there is no child."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time

from worker.engines.vllm.build import watch_children


def test_the_first_child_that_ends_is_told_with_its_status() -> None:
    ended: queue.Queue[str] = queue.Queue()
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=time.sleep, args=(60,), name=f"rank {i}") for i in range(2)]
    for child in children:
        child.start()
    try:
        watch_children(ended.put)
        assert children[1].pid is not None
        os.kill(children[1].pid, signal.SIGKILL)
        assert ended.get(timeout=10) == f"rank 1, process {children[1].pid}, ended with status -9"
        assert ended.empty()
    finally:
        for child in children:
            child.kill()
            child.join()


def test_without_children_nobody_is_watched() -> None:
    assert multiprocessing.active_children() == []
    watch_children(lambda sentence: None)
