"""The directory of a worker's cached files: kernels, measurements, converted tokenizers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path | None:
    """Returns $XDG_CACHE_HOME/penstock or ~/.cache/penstock, else a directory of the user's in the
    temporary directory; None if neither can be created.

    Others must not be able to put a library there.
    """
    wanted = os.environ.get("XDG_CACHE_HOME")
    base = Path(wanted) if wanted else Path.home() / ".cache"
    for directory in (
        base / "penstock",
        Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}",
    ):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        status = directory.stat()
        is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if is_ours and os.access(directory, os.W_OK | os.X_OK):
            return directory
    return None
