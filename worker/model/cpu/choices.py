"""ProductChoices: the fastest kernel for products of many rows, by times measured on this machine.

Every weight lies in our panels, which serve any number of rows, and AMX where it is there. oneDNN's
own layout is a second copy of a weight: it is made only where its product is clearly quicker.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from worker.engine_options import WeightCopies

logger = logging.getLogger(__name__)

ROWS = (64, 256)  # of x, for which the ways are measured
AVX, AMX, ONEDNN = "ours", "amx", "onednn"
LEAST_BYTES = 512 << 10  # of a weight; the product of a smaller one is lost in the noise
# For a second copy of a weight. Layers computed one by one, and a product called by itself, cost
# what a bare comparison does not show: at 1.25 times whole prompts took 1.4 times as long.
CLEARLY_QUICKER = 1.5
QUICKER = 1.05  # for other instructions on the same one

# Seconds of each way, one for each of ROWS. A way that is not there, or wrong, is left out.
Times = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A product's weight: [size_out, size_in], `is_gated` as for Ops.gated_linear."""

    size_out: int
    size_in: int
    is_gated: bool

    @property
    def name(self) -> str:
        return f"{self.size_out}x{self.size_in}{' gated' if self.is_gated else ''}"


@dataclass(frozen=True, slots=True)
class Choice:
    """From how many rows on AMX, or oneDNN's copy, computes; 0: never."""

    amx_rows: int = 0
    copy_rows: int = 0


def choose(times: Times) -> Choice:
    """Returns the quickest; a way is used from the fewest rows on from which it stays quicker."""
    best = times[AVX]
    amx_rows = _quicker_from(times.get(AMX), best, QUICKER)
    if amx_rows:
        amx = times[AMX]
        best = tuple(
            there if rows >= amx_rows else here
            for rows, here, there in zip(ROWS, best, amx, strict=True)
        )
    return Choice(amx_rows, _quicker_from(times.get(ONEDNN), best, CLEARLY_QUICKER))


def _quicker_from(times: tuple[float, ...] | None, others: tuple[float, ...], by: float) -> int:
    first = 0
    for rows, mine, other in zip(ROWS, times or (), others, strict=False):
        is_quicker = mine * by <= other
        first = (first or rows) if is_quicker else 0
    return first


class ProductChoices:
    """Choices by shape, each measured once on a machine: the times are kept in a file.

    If a copy would pay it is measured again at each load, and the best times count: on a busy
    machine a way looks slower than it is, never quicker.

    `copies`: "off" holds none, "on" wherever one is quicker, "auto" as long as all
    of them fit `free_bytes`.
    """

    def __init__(
        self,
        measure: Callable[[ProductShape], Times],
        path: Path | None,
        *,
        copies: WeightCopies,
        free_bytes: Callable[[], int],
    ) -> None:
        """`path` of the file, which need not exist; None: nothing is kept. `free_bytes` is asked
        once, before the first copy: by then the weights are loaded."""
        self._measure = measure
        self._path = path
        self._copies = copies
        self._ask_free_bytes = free_bytes
        self._free_bytes: int | None = None
        self._times: dict[str, Times] = _read(path) if path is not None else {}
        self._measured: set[str] = set()  # here, not read from the file
        self._logged: set[ProductShape] = set()

    def of(self, shape: ProductShape, num_bytes: int) -> Choice:
        """Returns the choice for a weight; a copy of it takes `num_bytes`, which are counted."""
        if num_bytes < LEAST_BYTES:
            return Choice()
        times = self._times.get(shape.name)
        is_new = shape.name not in self._measured
        if times is None or (is_new and choose(times).copy_rows):
            found = self._measure(shape)
            self._measured.add(shape.name)
            times = self._times[shape.name] = _best(found, times or found)
            if self._path is not None:
                _write(self._path, self._times)
        choice = choose(times)
        if choice.copy_rows and not self._may_copy(num_bytes):
            choice = Choice(choice.amx_rows)
        if shape not in self._logged:
            self._logged.add(shape)
            logger.debug(
                "product %s: amx_rows=%d copy_rows=%d ms=%s",
                shape.name,
                choice.amx_rows,
                choice.copy_rows,
                {way: [round(1e3 * s, 3) for s in seconds] for way, seconds in times.items()},
            )
        return choice

    def _may_copy(self, num_bytes: int) -> bool:
        if self._copies == "auto":
            if self._free_bytes is None:
                self._free_bytes = self._ask_free_bytes()
            if num_bytes > self._free_bytes:
                return False
            self._free_bytes -= num_bytes
        return self._copies != "off"


def _best(times: Times, others: Times) -> Times:
    """Returns the shorter of both for the ways of `times`."""
    return {
        way: tuple(map(min, seconds, others.get(way, seconds))) for way, seconds in times.items()
    }


def choices_path(directory: Path, machine: Mapping[str, str]) -> Path:
    """Returns the file for `machine`: processor, versions, threads."""
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:24]
    return directory / f"products-{digest}.json"


def _read(path: Path) -> dict[str, Times]:
    """Returns the file's content; nothing if it is missing or unreadable."""
    try:
        kept = json.loads(path.read_bytes())
        return {
            str(name): {str(way): _seconds(seconds) for way, seconds in times.items()}
            for name, times in kept.items()
            if AVX in times
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("cannot read the measured times in %s, measuring again: %s", path, error)
        return {}


def _seconds(kept: list[float]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in kept)
    if len(seconds) != len(ROWS) or min(seconds) <= 0:
        raise ValueError(f"expected {len(ROWS)} positive numbers of seconds, got {kept}")
    return seconds


def _write(path: Path, times: Mapping[str, Times]) -> None:
    """Replaces the file; several processes may, and the last one's stays."""
    try:
        handle, name = tempfile.mkstemp(prefix=".measured-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(times, out)
        Path(name).replace(path)
    except OSError as error:
        logger.warning("cannot write the measured times, the next start measures again: %s", error)
