"""The location of the packages `api`, `worker` and `shared`, and how processes import them.

In a clone they are beside this package. In an installed wheel they are in its folder `packages`,
so that a site-packages directory gets no package named `api`: only the command and the processes
that it starts have them on their path (docs/adr/0053).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def rooms_directory() -> Path:
    """Returns the directory that has the packages."""
    inside = _PACKAGE / "packages"
    return inside if inside.is_dir() else _PACKAGE.parent


def import_rooms() -> None:
    """Puts the packages first on the path of this process."""
    directory = str(rooms_directory())
    if directory not in sys.path:
        sys.path.insert(0, directory)


def reach_rooms() -> None:
    """Puts the packages on the path of this process and, by the environment, of its children.

    They come first, and the current directory is on no child's path: a folder `api` or `shared` of
    the user's terminal is not ours.
    """
    import_rooms()
    directory = str(rooms_directory())
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if directory not in others:
        os.environ["PYTHONPATH"] = os.pathsep.join([directory, *others])
    os.environ["PYTHONSAFEPATH"] = "1"
