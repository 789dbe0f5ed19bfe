"""Check of traces: whether what the environment asks for can be sent."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from penstock.doctor.finding import Finding, fine, warning
from shared.tracing import endpoint_of, fault_of, is_requested

CONNECT_S = 2.0
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter")


def check_traces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields what was seen of the collector of traces; nothing where none are asked for."""
    if not is_requested(environ):
        return
    fault = fault_of(environ) or _missing_package() or _unreachable(endpoint_of(environ))
    if fault:
        yield warning("traces", f"No traces are sent: {fault}.")
    else:
        yield fine("traces", f"They are sent to {endpoint_of(environ)}.")


def _missing_package() -> str:
    for name in PACKAGES:
        try:
            if importlib.util.find_spec(name) is not None:
                continue
        except ModuleNotFoundError:  # of what `name` is in
            pass
        return f"{name} is not installed: pip install 'penstock[otel]'"
    return ""


def _unreachable(endpoint: str) -> str:
    """Returns why nothing listens at a URL, or ""."""
    try:
        url = urlsplit(endpoint)
        port = url.port or (443 if url.scheme == "https" else 80)
        if not url.hostname:
            return f"{endpoint!r} is no URL of a collector"
        with socket.create_connection((url.hostname, port), CONNECT_S):
            return ""
    except ValueError as error:
        return f"{endpoint!r} is no URL: {error}"
    except OSError as error:
        return f"{endpoint} cannot be reached ({error.strerror or error})"
