"""Threads with a deep stack, for native code that recurses as deep as its input is nested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

# Address space; memory is taken as far as the recursion goes. A quarter of it was enough for the
# most deeply nested grammars of shared.messages.MAX_GRAMMAR_CHARS, an eighth was not.
STACK_BYTES = 256 * 2**20

_starting = threading.Lock()


def start_deep(work: Callable[[], Result]) -> Future[Result]:
    """Runs `work` on a new thread. Its result or exception is the future's."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # as a panic in Rust is raised
            future.set_exception(RuntimeError(f"native code failed: {error}"))

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    # The size is the process's setting for threads to come: kept for as long as one start takes.
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future
