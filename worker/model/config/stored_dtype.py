"""The dtype of a checkpoint whose config.json names none: that of most of its numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER_BYTES = 128 * 2**20


def stored_dtype(directory: Path) -> str | None:
    """Returns it by the header of the first safetensors file; None if none can be read,
    which the loader finds out as well."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    numbers: Counter[str] = Counter()
    try:
        with files[0].open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MAX_HEADER_BYTES else {}
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in _NAMES:
                numbers[_NAMES[tensor["dtype"]]] += math.prod(tensor["shape"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return numbers.most_common(1)[0][0] if numbers else None
