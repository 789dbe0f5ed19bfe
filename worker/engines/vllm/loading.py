"""vLLM's records and progress bars while it loads, as this project's log and LoadProgress.

vLLM reports its progress only for people: in log records and in bars on standard error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from worker.engine.interface import Progress

IMPORTING, WEIGHTS, COMPILING = "importing vLLM", "loading weights", "compiling"
KV_CACHE, GRAPHS, WARM_UP = "allocating KV cache", "capturing CUDA graphs", "warming up"
FIRST_USE = "compiling what requests use"

# Messages of records that start or end a stage, in the releases that check_version accepts.
_RECORDS: tuple[tuple[re.Pattern[str], str, float], ...] = (
    (re.compile("Starting to load model"), WEIGHTS, 0.0),
    (re.compile("Loading weights took|Model loading took"), WEIGHTS, 1.0),
    (re.compile("Dynamo bytecode transform|Compiling a graph|Start compiling"), COMPILING, 0.0),
    (re.compile("Warming up model|Compile and warming up"), WARM_UP, 0.0),
    (re.compile("Available KV cache memory|%s KV cache size"), KV_CACHE, 0.0),
    (re.compile("Graph capturing finished"), GRAPHS, 1.0),
)
_BARS = {"Loading": WEIGHTS, "Capturing": GRAPHS}
_BAR = re.compile(r"(Loading|Capturing)[^%]*?(\d{1,3})%")
# vLLM inspects a model's code in another process, whose errors it only logs.
_INSPECTION = re.compile("Error in (inspecting|loading) model architecture")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_DUMP = "vllm.logging_utils.dump_input"
# Warnings of every start that name no fault and require no action.
_NORMAL = re.compile(
    "The global random seed is set to|Enforce eager set|Inductor compilation was disabled|"
    "Triton is not installed|Reset SSM cache type|libtcmalloc is not found|"
    "CPU backend doesn't allow to use `torch.set_num_threads`|Default vLLM sampling parameters|"
    "Pin memory is not supported|Async scheduling"
)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    is_vllms = record.name.startswith("vllm") and record.levelno <= logging.WARNING
    return not (is_vllms and _NORMAL.match(str(record.msg)))


def log_records(level: int) -> None:
    """Sends vLLM's records to this process's log: warnings where that has `level` INFO, as INFO is
    one line for each of vLLM's decisions. Warnings of every start are left out above DEBUG."""
    least = logging.INFO if level <= logging.DEBUG else max(level, logging.WARNING)
    logging.getLogger("vllm").setLevel(least)
    if level > logging.DEBUG:
        # It logs the requests of a failed step: prompts' tokens, biases, schemas.
        logging.getLogger(_DUMP).setLevel(logging.CRITICAL + 1)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_worth_a_line)
    # These address vLLM's own developers.
    warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass
class Records:
    """Facts about a failure from vLLM's records."""

    missing_module: str = ""


@contextlib.contextmanager
def progress(report: Progress) -> Iterator[Records]:
    """Reports vLLM's stages while it loads; its bars are not shown."""
    logger = logging.getLogger("vllm")
    least = logger.level
    records = Records()
    handler = _StageHandler(report, records, least)
    logger.setLevel(min(least, logging.INFO))
    logger.propagate = False
    logger.addHandler(handler)
    bars = _BarReader(report)
    try:
        with contextlib.redirect_stderr(bars):
            yield records
    finally:
        bars.end()
        logger.removeHandler(handler)
        logger.setLevel(least)
        logger.propagate = True


class _StageHandler(logging.Handler):
    """Finds the stages in vLLM's records; hands on those of `least` severity."""

    def __init__(self, report: Progress, records: Records, least: int) -> None:
        super().__init__(logging.INFO)
        self._report = report
        self._records = records
        self._least = least

    def emit(self, record: logging.LogRecord) -> None:
        text = str(record.msg)
        for pattern, stage, share in _RECORDS:
            if pattern.match(text):
                self._report(stage, share)
        failed = _INSPECTION.match(text) and record.exc_info
        if failed and (found := _NO_MODULE.search(str(failed[1]))):
            self._records.missing_module = found[1]
            return  # the rest is a traceback of another process
        if record.levelno >= self._least:
            logging.getLogger().handle(record)


class _BarReader(io.TextIOBase):
    """Standard error: takes out the bars that are stages, and passes on all else."""

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._stream: TextIO = sys.stderr
        self._in_bar = False
        self._is_over = False

    def write(self, text: str) -> int:
        found = None if self._is_over else _BAR.search(text)
        if found is not None:
            self._in_bar = True
            self._report(_BARS[found[1]], min(100, int(found[2])) / 100)
        elif not (self._in_bar and not text.strip()):  # a bar ends its line
            self._in_bar = False
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return False

    def end(self) -> None:
        """Passes everything on from now: code that kept a reference may still write."""
        self._is_over, self._in_bar = True, False
