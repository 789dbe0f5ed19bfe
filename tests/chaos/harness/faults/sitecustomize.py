"""Faults that a process cannot be given from outside; on PYTHONPATH of the processes under test.

Python imports this by itself at start. It does nothing unless the process is an engine (then its
echo runner gets traps, which a prompt springs by its first token) or CHAOS_CLOCK_OFFSET_S is set.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from typing import Any

POISON_TOKEN = 350  # kills the engine before the job's first token of this attempt
CRASHER_TOKEN = 351  # kills the engine after three tokens of this attempt
CRASHER_TOKENS = 3


def _set_traps() -> None:
    from worker.engine.echo_runner import EchoModelRunner

    launch = EchoModelRunner.launch
    num_sampled: Counter[int] = Counter()

    def trapped(self: EchoModelRunner, batch: Any) -> Any:
        for sequence in batch.sequences:
            trap = sequence.prompt_token_ids[0]
            if trap == POISON_TOKEN:
                os.kill(os.getpid(), signal.SIGKILL)
            if trap == CRASHER_TOKEN and sequence.samples:
                num_sampled[sequence.seq_id] += 1
                if num_sampled[sequence.seq_id] > CRASHER_TOKENS:
                    os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, batch)

    EchoModelRunner.launch = trapped  # type: ignore[method-assign]


def _shift_clock(offset_s: float) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + offset_s
    time.time_ns = lambda: now_ns() + int(offset_s * 1e9)


if "worker.engine_process" in sys.orig_argv and os.environ.get("RUNNER") == "echo":
    _set_traps()
if "CHAOS_CLOCK_OFFSET_S" in os.environ:
    _shift_clock(float(os.environ["CHAOS_CLOCK_OFFSET_S"]))
