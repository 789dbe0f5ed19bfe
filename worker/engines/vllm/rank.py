"""CpuRank: vLLM's worker class for CPUs, in the engine process or in a child of it."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from shared.process import die_with_parent
from worker.engines.vllm.amx import permit_amx
from worker.engines.vllm.load_errors import report_load_errors


class CpuRank(CPUWorker):
    """vLLM's worker, in a process that may use AMX; as a child, one that ends with its parent."""

    def __init__(self, *args: Any, **values: Any) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            assert parent.pid is not None, "it has started this process"
            # vLLM watches its parent only after the model is loaded, and not during a step.
            die_with_parent(parent.pid, signal.SIGKILL)
        permit_amx()  # a child that was spawned does not inherit it
        super().__init__(*args, **values)

    def init_device(self) -> None:
        with report_load_errors():
            super().init_device()

    def load_model(self, *args: Any, **values: Any) -> None:
        with report_load_errors():
            super().load_model(*args, **values)

    def determine_available_memory(self) -> int:
        with report_load_errors():
            return int(super().determine_available_memory())
