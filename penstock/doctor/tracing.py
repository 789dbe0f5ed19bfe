"""Checks of tracing: packages, OpenTelemetry's variables, and whether the collector takes spans."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.doctor.finding import Finding, fine, warning
from shared.tracing_export import find_faults

COLLECTOR_TIMEOUT_S = 5.0


def check_tracing() -> Iterator[Finding]:
    """Yields findings about the collector that the processes would send their spans to, which
    gets a request without any. Whatever is wrong, the service runs."""
    faults = find_faults(COLLECTOR_TIMEOUT_S)
    if faults is None:
        yield fine("tracing", "Off: no variable of OpenTelemetry names a collector.")
    elif not faults:
        yield fine("tracing", "The collector takes traces.")
    for fault in faults or ():
        yield warning("tracing", f"{fault}. The service runs, and spans are lost.")
