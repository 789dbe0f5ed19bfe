"""How many examples a property is tried with."""

from __future__ import annotations

import os

EXAMPLES = "PENSTOCK_EXAMPLES"  # a factor, 1 by default; `make chaos` sets it


def examples(count: int) -> int:
    """Returns the number of examples, or steps of a random walk, for a usual `count`."""
    return count * int(os.environ.get(EXAMPLES, "1"))
