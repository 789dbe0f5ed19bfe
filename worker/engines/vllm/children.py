"""The processes that vLLM starts for parts of a model. Imports nothing of vLLM."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait


def watch_children(on_end: Callable[[str], None]) -> None:
    """Calls `on_end` with a sentence, in a thread, when the first of vLLM's children has ended.

    vLLM itself notices it in its next step. Call it when the model is loaded.
    """
    children = multiprocessing.active_children()
    if not children:
        return

    def watch() -> None:
        ended = wait([child.sentinel for child in children])
        child = next(child for child in children if child.sentinel in ended)
        child.join()
        if threading.main_thread().is_alive():  # else this process ends, and ends them
            on_end(f"{child.name}, process {child.pid}, ended with status {child.exitcode}")

    threading.Thread(target=watch, name="children of vLLM", daemon=True).start()
