"""KeptIds: the token ids of long texts between special tokens, for the next prompt that has them.

Each turn of a conversation repeats the earlier ones: tools, long documents and answers. Encoding
them is most of the work of a long prompt.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

LEAST_CHARS = 2048  # of a text that is kept
MAX_BYTES = 16 * 2**20  # of all entries
ENTRY_BYTES = 512  # of one besides its ids

Encode = Callable[[str], Sequence[int]]


class KeptIds:
    """The least recently used are dropped first. Safe on several threads.

    `special`: matches the tokens at which the tokenizer first divides a text, so that the text
    between two of them is encoded by itself.
    """

    def __init__(self, special: re.Pattern[str], max_bytes: int = MAX_BYTES) -> None:
        self._special = special
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()

    def encoded(self, text: str, tenant: str, encode: Encode) -> list[int]:
        """Returns the ids of a text. Tenants share no entries: the response time would show that
        another tenant has sent the same text."""
        ids: list[int] = []
        for part, is_long in self._parts(text):
            ids.extend(self._of_long(part, tenant, encode) if is_long else encode(part))
        return ids

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the text in order: long texts between two special tokens, and the rest."""
        begin = last = 0
        ends = [found.span() for found in self._special.finditer(text)]
        for first, end in [*ends, (len(text), len(text))]:
            if first - last >= LEAST_CHARS:
                if begin < last:
                    yield text[begin:last], False
                yield text[last:first], True
                begin = first
            last = end
        if begin < len(text):
            yield text[begin:], False

    def _of_long(self, text: str, tenant: str, encode: Encode) -> Sequence[int]:
        key = hashlib.sha256(f"{len(tenant)}:{tenant}{text}".encode()).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        ids = array("I", encode(text))
        num_bytes = _size(ids)
        with self._lock:
            if num_bytes <= self._max_bytes and key not in self._kept:
                self._kept[key] = ids
                self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= _size(dropped)
        return ids


def _size(ids: array[int]) -> int:
    return ids.itemsize * len(ids) + ENTRY_BYTES
