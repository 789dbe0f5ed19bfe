"""This machine's name, as a part of the names of its processes."""

from __future__ import annotations

import socket

MAX_CHARS = 40


def host_name() -> str:
    """Letters, digits, '-' and '.' only: it stands in keys."""
    return "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:MAX_CHARS]
