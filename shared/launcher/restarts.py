"""Restarts: how often something that dies may be started again, and after which pause."""

from __future__ import annotations

MAX_QUICK_DEATHS = 5  # deaths in a row, each before HEALTHY_AFTER_S
HEALTHY_AFTER_S = 10.0
FIRST_BACKOFF_S = 0.2


class GaveUp(Exception):
    """Something cannot be kept running; `exit_code` is what the launcher should end with."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Restarts:
    """Counts the deaths of one thing. What lived long enough begins at zero again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._quick_deaths = 0

    def backoff_s(self, lived_s: float) -> float:
        """The pause before the next start. Raises GaveUp after too many quick deaths in a row."""
        self._quick_deaths = self._quick_deaths + 1 if lived_s < HEALTHY_AFTER_S else 1
        if self._quick_deaths > MAX_QUICK_DEATHS:
            raise GaveUp(f"{self._name} died {self._quick_deaths} times in a row", 1)
        return FIRST_BACKOFF_S * 2.0 ** (self._quick_deaths - 1)
