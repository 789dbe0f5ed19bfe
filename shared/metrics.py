"""Tables of metrics, and their text format: under Penstock's names, vLLM's, or both.

A part has one table of all that it exposes, from which docs/METRICS.md is written. Its registry
holds the values; `Exposition` adds the labels that all of its samples share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "penstock:"
VLLM_PREFIX = "vllm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsNames(StrEnum):
    """Which names a metric has that vLLM has too. All others have Penstock's in any case."""

    PENSTOCK = "penstock"
    VLLM = "vllm"
    BOTH = "both"


class MetricRow(NamedTuple):
    """One metric. `is_vllms`: vLLM has one of the same meaning and name, with the prefix `vllm:`.

    The name of a counter ends in `_total`.
    """

    name: str
    kind: str  # gauge, counter or histogram
    labels: tuple[str, ...]
    meaning: str
    is_vllms: bool = False


class MetricTable:
    """All metrics of one part; makes them by their names."""

    def __init__(self, rows: Sequence[MetricRow], labels: tuple[str, ...] = ()) -> None:
        """`labels` are those that every sample has besides its row's own."""
        self.rows = rows
        self.labels = labels
        self._by_name = {row.name: row for row in rows}

    def counter(self, name: str, registry: CollectorRegistry) -> Counter:
        row = self._row(name, "counter")
        return Counter(_family_of(row), row.meaning, row.labels, registry=registry)

    def histogram(
        self, name: str, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> Histogram:
        row = self._row(name, "histogram")
        return Histogram(name, row.meaning, row.labels, registry=registry, buckets=buckets)

    def value(self, name: str, value: float, labels: Sequence[str] = ()) -> Metric:
        """Returns a gauge or counter with one value, and the values of its row's labels."""
        family = self.family(name)
        family.add_metric(labels, value)
        return family

    def values(self, name: str, values: Mapping[str, float]) -> Metric:
        """Returns a gauge or counter that has one label, with its values by that label."""
        family = self.family(name)
        for label, value in values.items():
            family.add_metric([label], value)
        return family

    def family(self, name: str) -> GaugeMetricFamily | CounterMetricFamily:
        """Returns a gauge or counter without values, to which `add_metric` adds them."""
        row = self._by_name[name]
        assert row.kind != "histogram"
        make = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
        return make(_family_of(row), row.meaning, labels=row.labels)

    def counted(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        """Returns a histogram without labels, of `counts` between `bounds`; the last count lies
        beyond all of them. `total` is the sum of the observations."""
        row = self._row(name, "histogram")
        family = HistogramMetricFamily(name, row.meaning)
        reached, buckets = 0, []
        for bound, count in zip((*bounds, float("inf")), counts, strict=True):
            reached += count
            buckets.append((str(float(bound)) if bound != float("inf") else "+Inf", float(reached)))
        family.add_metric((), buckets, total)
        return family

    def is_vllms(self, family: str) -> bool:
        """Returns whether vLLM has the metric of a family, whose name may lack `_total`."""
        row = self._by_name.get(family) or self._by_name[f"{family}_total"]
        return row.is_vllms

    def _row(self, name: str, kind: str) -> MetricRow:
        row = self._by_name[name]
        assert row.kind == kind, f"{name} is a {row.kind}"
        return row


class Exposition(Collector):
    """A registry's metrics under the chosen names, each with the labels that all share."""

    def __init__(
        self,
        table: MetricTable,
        registry: CollectorRegistry,
        names: MetricsNames,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._table = table
        self._registry = registry
        self._names = names
        self._labels = dict(labels or {})

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            for name in self._names_of(family.name):
                yield self._renamed(family, name)

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self)

    def _names_of(self, family: str) -> Iterator[str]:
        is_vllms = self._table.is_vllms(family)
        if not is_vllms or self._names is not MetricsNames.VLLM:
            yield family
        if is_vllms and self._names is not MetricsNames.PENSTOCK:
            yield VLLM_PREFIX + family.removeprefix(PREFIX)

    def _renamed(self, family: Metric, name: str) -> Metric:
        metric = Metric(name, family.documentation, family.type)
        metric.samples = [
            Sample(
                name + sample.name.removeprefix(family.name),
                {**sample.labels, **self._labels},
                sample.value,
            )
            for sample in family.samples
            # Creation times of counters would double the number of series.
            if not sample.name.endswith("_created")
        ]
        return metric


def _family_of(row: MetricRow) -> str:
    return row.name.removesuffix("_total") if row.kind == "counter" else row.name
