"""Huge pages for a heap that stays: code that has not run for a while finds its objects sooner.

Objects of an interpreter lie scattered over tens of megabytes. In pages of 4 KiB their addresses
fit no processor's cache of addresses, and each miss is a walk through tables, in a virtual machine
through those of the host as well.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

HUGE_BYTES = 2 << 20
MAX_BYTES = 64 << 20  # of a mapping: larger ones are tensors, and see to themselves
_MADV_COLLAPSE = 25  # Linux 6.1; older ones refuse it
_PAGES = HUGE_BYTES // mmap.PAGESIZE


def collapse_heap() -> int:
    """Moves the parts of this process's heap that are mostly in use into huge pages. Returns how
    many bytes it moved: 0 on a system that cannot do it.

    Takes about half a millisecond for each page, without holding the interpreter. The moved
    memory takes at most twice as much as before.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    present = ctypes.create_string_buffer(_PAGES)
    num_bytes = 0
    for begin, end in _mappings():
        first = -(-begin // HUGE_BYTES) * HUGE_BYTES
        for place in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
            if libc.mincore(place, HUGE_BYTES, present) != 0:
                continue  # given back meanwhile
            if 2 * present.raw.count(b"\x01") < _PAGES:
                continue  # reserved, or freed
            if libc.madvise(place, HUGE_BYTES, _MADV_COLLAPSE) == 0:
                num_bytes += HUGE_BYTES
    return num_bytes


def _mappings() -> Iterator[tuple[int, int]]:
    """Yields start and end of each private, anonymous, writable mapping; nothing if /proc is not
    mounted."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(address, 16) for address in span.split("-"))
        if end - begin <= MAX_BYTES:
            yield begin, end
