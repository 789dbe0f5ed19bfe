"""The measured rate at which waiting work is done; a refusal's Retry-After is computed from it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Set

WINDOW_S = 30.0
MAX_SAMPLES = 256
MIN_MEASURED_S = 2.0  # shorter measurements prove nothing
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
UNKNOWN_RETRY_S = 2.0
JITTER = 0.2


class DrainRate:
    """Tokens computed per second by the workers of one model, prompts and outputs, over the last
    half minute.

    Only time in which work waited counts: the speed of an engine without enough work does not show
    its capacity.
    """

    def __init__(self, *, is_served: bool = True) -> None:
        self._is_served = is_served
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MAX_SAMPLES)
        self._totals: Mapping[str, float] = {}
        self._at_s: float | None = None  # of the last look, when work waited

    def observe(self, totals: Mapping[str, float], now_s: float, *, is_waiting: bool) -> None:
        """Takes the tokens that each worker has computed so far; `now_s` is monotonic.

        A worker that is seen for the first time, or that restarted its counts, adds nothing yet.
        """
        if self._at_s is not None and is_waiting:
            grown = sum(
                max(0.0, total - self._totals.get(worker, total))
                for worker, total in totals.items()
            )
            self._samples.append((now_s, now_s - self._at_s, grown))
        self._totals = dict(totals)
        self._at_s = now_s if is_waiting else None
        while self._samples and now_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """The measured rate; None: not measured. 0.0: work waited and nothing was done."""
        measured_s = sum(elapsed_s for _, elapsed_s, _ in self._samples)
        if measured_s < MIN_MEASURED_S:
            return None
        return sum(grown for _, _, grown in self._samples) / measured_s

    def retry_after_s(self, num_tokens: int) -> float:
        """Returns the bounded seconds until `num_tokens` are computed, spread by up to a fifth."""
        rate = self.tokens_per_s
        if not self._is_served:
            return spread_s(MAX_RETRY_S)  # when a worker will come is not known
        if rate is None:
            return spread_s(UNKNOWN_RETRY_S)
        return spread_s(num_tokens / rate if rate else MAX_RETRY_S)


class DrainRates:
    """The drain rates of the models that live workers serve."""

    def __init__(self) -> None:
        self._by_model: dict[str, DrainRate] = {}
        self._has_looked = False

    def of(self, model: str) -> DrainRate:
        """Returns the model's rate; an empty one for a model that no worker serves."""
        return self._by_model.get(model) or DrainRate(is_served=not self._has_looked)

    def observe(
        self, totals: Mapping[str, Mapping[str, float]], waiting: Set[str], now_s: float
    ) -> None:
        """Takes `totals` by model and worker, see DrainRate; `waiting`: models with queued work."""
        self._by_model = {model: self._by_model.get(model) or DrainRate() for model in totals}
        self._has_looked = True
        for model, of_workers in totals.items():
            self._by_model[model].observe(of_workers, now_s, is_waiting=model in waiting)


def spread_s(wait_s: float) -> float:
    """Returns the wait within the bounds of a Retry-After, spread over clients refused at once."""
    wait_s = min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s))
    return min(MAX_RETRY_S, wait_s * (1.0 + JITTER * random.random()))
