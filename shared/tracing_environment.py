"""OpenTelemetry's variables: whether they ask for traces, and what of them cannot be done.

No sentence has the value of a header or of a URL: both may hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
# One of them, as the SDK reads it (opentelemetry.util.re). What it cannot read it leaves out, and
# logs whole.
_HEADER = re.compile(r"[!#-'*+\-.0-9A-Z^-z|~]+[ \t]*=[ !#-+\--\[\]-~]*")


def is_requested(environ: Mapping[str, str]) -> bool:
    """Returns whether processes with these variables send traces."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters:
        return exporters != "none"
    return bool(_first(environ, _ENDPOINTS))


def fault_of(environ: Mapping[str, str]) -> str:
    """Returns why traces cannot be sent as the variables have it, or ""."""
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters not in ("", "otlp"):
        return f"OTEL_TRACES_EXPORTER={exporters!r}: otlp and none are known"
    name = _first(environ, _PROTOCOLS)
    if name and environ[name] != "http/protobuf":
        return f"{name}={environ[name]!r}: http/protobuf is known"
    name = _first(environ, _ENDPOINTS)
    if name and not re.match(r"https?://[^/:]", environ[name], re.I):
        return f"{name}: a URL that begins with http:// or https:// is needed"
    name = _first(environ, _HEADERS)
    headers = filter(None, map(str.strip, environ.get(name, "").split(",")))
    if not all(map(_HEADER.fullmatch, headers)):
        return f"{name}: name=value is needed, and commas between; other characters as %2C"
    return ""


def collector_of(environ: Mapping[str, str]) -> str:
    """Returns the collector's host and port, with the port's source."""
    url = urlsplit(environ.get(_first(environ, _ENDPOINTS)) or "http://localhost:4318")
    known = "; 4317 is gRPC's port, that of HTTP is 4318" if url.port == 4317 else ""
    return f"{url.hostname}:{url.port or {'http': 80, 'https': 443}[url.scheme]}{known}"


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Returns the first of the names that has a value, as the SDK looks for them, or ""."""
    return next((name for name in names if environ.get(name)), "")
