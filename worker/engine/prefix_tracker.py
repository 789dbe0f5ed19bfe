"""PrefixTracker: which prefixes the index of blocks holds, for the queue that deals out jobs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from shared.prefixes import PREFIX_STEP, next_digest, root_digest
from worker.engine.measures import PrefixChanges

if TYPE_CHECKING:
    from worker.engine.block_hash import BlockHash
    from worker.engine.sequence import Sequence


class PrefixTracker:
    """Digests of the prefixes that end in a block of the index, and their changes since `drain`:
    at most those held now and those held then."""

    def __init__(self) -> None:
        self._digests: dict[Hashable, list[bytes]] = {}  # only of blocks in which one ends
        self._drained: set[bytes] = set()  # held when `drain` was called
        self._changes: dict[bytes, bool] = {}

    def stored(self, sequence: Sequence, i: int, block_size: int, block: BlockHash) -> None:
        """Notes that block `i` of the sequence can be found from now on."""
        first, end = (n * block_size // PREFIX_STEP for n in (i, i + 1))
        if first == end:
            return
        digests = sequence.prefix_digests
        while len(digests) < end:
            at = len(digests) * PREFIX_STEP
            before = digests[-1] if digests else root_digest(sequence.tenant)
            digests.append(next_digest(before, sequence.token_ids[at : at + PREFIX_STEP]))
        self.hold(block, digests[first:end])

    def hold(self, block: Hashable, digests: list[bytes]) -> None:
        """Notes that a block in which these end, if any, can be found from now on."""
        if digests:
            self._digests[block] = digests
        for digest in digests:
            self._note(digest, is_held=True)

    def evicted(self, block: Hashable) -> None:
        """Notes that a block can no longer be found."""
        for digest in self._digests.pop(block, ()):
            self._note(digest, is_held=False)

    def drain(self) -> PrefixChanges:
        """Returns the digests that changed since the last call, each with whether it is held."""
        changes = tuple(self._changes.items())
        for digest, is_held in changes:
            (self._drained.add if is_held else self._drained.remove)(digest)
        self._changes.clear()
        return changes

    def _note(self, digest: bytes, *, is_held: bool) -> None:
        if (digest in self._drained) == is_held:
            self._changes.pop(digest, None)
        else:
            self._changes[digest] = is_held
