"""Scrapes of a deployment: what its processes expose, read by Prometheus' own client library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import MetricTable

# As Prometheus asks: OpenMetrics has other rules for names.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One exposition: the families' names with the suffix of a counter, and their samples."""

    names: frozenset[str]
    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def of(cls, url: str) -> Scrape:
        response = httpx.get(url, headers={"accept": ACCEPT}, timeout=10)
        response.raise_for_status()
        families = list(text_string_to_metric_families(response.text))
        names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
        samples = [(s.name, s.labels, s.value) for f in families for s in f.samples]
        return cls(frozenset(names), tuple(samples))

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a sample's values over all labels but those that are given."""
        return sum(
            value
            for found, own, value in self.samples
            if found == name and labels.items() <= own.items()
        )

    def label_values(self, label: str) -> set[str]:
        return {own.get(label, "") for _, own, _ in self.samples}


def names_of(table: MetricTable) -> set[str]:
    return {row.name for row in table.rows}
