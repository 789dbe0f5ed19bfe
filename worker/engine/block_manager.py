"""BlockManager: owners of KV blocks, by id, reference count and hash; no tensors.

A block is exactly one of:

    free      held by no sequence, not in the index: its content is worthless
    owned     `ref_count` block tables hold it (more than one: a shared prefix)
    cached    held by no sequence; its content is whole and can be found by its hash

                    allocate                          release, published
          free ----------------> owned ------------------------------------> cached
            ^                    |   ^                                       |   |
            |   release,         |   |        prefix hit                     |   |
            +--- not published --+   +---------------------------------------+   |
            |                        |        evicted, least recently used first |
            |                        +-------------------------------------------+
            +---- its place in the index taken over (see `publish`) -------------+

A block becomes findable (*published*) when it is full of known tokens whose KV has been computed.
The index is keyed by content hash (block_hash.py), which is the same in other processes. A hit is
exact: the tokens are compared, and so is the parent, by a `uid` that stands for
"these tokens after that parent" within this process. A collision costs a miss, never a wrong token.

When two sequences compute the same content at the same time, the second block stays where it is
(block tables are append-only: no block is swapped under a running batch) and becomes an
*alias*: same uid, so its children chain on as if it were the first, but it is not findable and is
simply free again when released.

Windows: if no query reaches more than `window` tokens, a sequence gives up the blocks before
them as it is computed, and holds at most `held` at once. Its table keeps their entries, which are
any blocks by then and never read. A prefix hit needs the blocks of its last window only; the
content of those before is compared as ever, so it is kept for a while when a block is evicted.

With an OffloadTier, a block that is evicted is offered to it first, and `load` takes copies back
into blocks that a sequence has.

Every operation costs O(1) per block it touches, whatever the size of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from worker.engine.block_hash import (
    BlockHash,
    BlockHasher,
    block_hash,
    root_hash,
    secure_block_hash,
)
from worker.engine.errors import IntegrityError
from worker.engine.offload import OffloadTier
from worker.engine.prefix_tracker import PrefixTracker
from worker.engine.sequence import Sequence as TokenSequence

_UNPUBLISHED = 0
_UNREACHED = 0  # in a block table, where no query reads: any block
_EVICTED_PER_BLOCK = 4  # contents that are kept for each block of the pool, with a window


class Block:
    """One block's books. `uid`, `parent` and `token_ids` are its content once published."""

    __slots__ = ("hash", "parent", "ref_count", "tenant", "token_ids", "uid")

    def __init__(self) -> None:
        self.ref_count = 0
        self.uid = _UNPUBLISHED
        self.parent: int | str = _UNPUBLISHED  # the parent's uid; the tenant for a first block
        self.token_ids: tuple[int, ...] = ()
        self.hash: BlockHash | None = None  # set while the index points here
        self.tenant = ""  # of the sequence that published it

    def forget(self) -> None:
        self.uid = _UNPUBLISHED
        self.parent = _UNPUBLISHED
        self.token_ids = ()
        self.hash = None

    def holds(self, parent: int | str, token_ids: tuple[int, ...]) -> bool:
        return self.parent == parent and self.token_ids == token_ids


class BlockManager:
    """Gives blocks to sequences and takes them back; the only writer of their block tables."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        hasher: BlockHasher = block_hash,
        window: int | None = None,
        held: int | None = None,
        num_offload_blocks: int = 0,
    ) -> None:
        """`held`: the most blocks of one sequence, EngineConfig.sequence_blocks. With
        `num_offload_blocks`, copies of blocks in host memory, names are secure_block_hash's."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hasher = secure_block_hash if num_offload_blocks else hasher
        self.offload: OffloadTier | None = None
        if num_offload_blocks:
            self.offload = OffloadTier(num_offload_blocks, self._on_copy_lost)
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the front is evicted first
        self._index: dict[BlockHash, int] = {}
        self._last_uid = _UNPUBLISHED
        self.prefixes = PrefixTracker(block_size)
        # The last full block of a sequence stays, as the parent of the next one.
        self._window = None if window is None else max(window, block_size + 1)
        self._held = held
        self._evicted: OrderedDict[BlockHash, Block] = OrderedDict()  # contents; the oldest first
        # A sequence may give up a block at this number of computed tokens modulo block size.
        self.turn = 0 if self._window is None else (self._window - 1) % block_size

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks held by no sequence whose content can still be hit."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks held by no sequence, which could be allocated now."""
        return len(self._free) + len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` holds at once."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks if self._held is None else min(num_blocks, self._held)

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def match(self, sequence: TokenSequence) -> list[int]:
        """Returns the longest run of findable blocks that holds the sequence's first tokens.

        Blocks that no later query reaches may be missing. Never covers a token that has to be
        computed: see Sequence.num_skippable_tokens. Changes nothing: `allocate` takes the blocks.
        """
        if not self.prefix_caching:
            return []
        hits: list[int | None] = []
        num_blocks = sequence.num_skippable_tokens // self.block_size
        parent: int | str = sequence.tenant
        for i in range(num_blocks):
            self._hash_up_to(sequence, i + 1)
            key = sequence.block_hashes[i]
            block_id = self._index.get(key)
            block = self._evicted.get(key) if block_id is None else self._blocks[block_id]
            if block is None or not block.holds(parent, self._tokens_of(sequence, i)):
                break
            hits.append(block_id)
            parent = block.uid
        return self._reachable(hits)

    def touch_copies(self, sequence: TokenSequence, first: int) -> None:
        """Keeps the offload tier's copies of a sequence's blocks, from `first` on, while blocks are
        evicted for it."""
        if self.offload is not None:
            num_blocks = sequence.num_skippable_tokens // self.block_size
            self._hash_up_to(sequence, num_blocks)
            self.offload.touch(sequence.block_hashes[first:num_blocks])

    def load(self, sequence: TokenSequence, start: int, most_tokens: int) -> tuple[int, bool]:
        """Has the offload tier's copies loaded into the sequence's own blocks from `start` on, at
        most `most_tokens`. They are published like computed ones.

        Returns the number of tokens, and whether the next block has a copy too.
        """
        if self.offload is None or start % self.block_size:
            return 0, False
        tenant, num_tokens = sequence.tenant, 0
        first = start // self.block_size
        end = min(sequence.num_skippable_tokens // self.block_size, len(sequence.block_table))
        for i in range(first, end):
            self._hash_up_to(sequence, i + 1)
            key = sequence.block_hashes[i]
            is_last = num_tokens + self.block_size > most_tokens
            if is_last or not self.offload.load(key, tenant, sequence.block_table[i]):
                return num_tokens, self.offload.holds(key, tenant)
            num_tokens += self.block_size
        return num_tokens, False

    def _on_copy_lost(self, key: BlockHash) -> None:
        if key not in self._index:
            self.prefixes.evicted(key)

    def _reachable(self, hits: list[int | None]) -> list[int]:
        """Returns the longest beginning of `hits` whose last window is there, without the blocks
        before it. None: a block was evicted."""
        num_hits, first = len(hits), self._first_reached(len(hits) * self.block_size)
        i = num_hits
        while i > first:
            i -= 1
            if hits[i] is None:
                num_hits, first = i, self._first_reached(i * self.block_size)
        return [
            _UNREACHED if i < first or block_id is None else block_id
            for i, block_id in enumerate(hits[:num_hits])
        ]

    def _first_reached(self, num_computed: int) -> int:
        """Returns the first block that queries after `num_computed` tokens reach."""
        if self._window is None:
            return 0
        return max(0, num_computed - self._window + 1) // self.block_size

    def can_allocate(
        self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int] = (), spare: int = 0
    ) -> bool:
        """Returns whether `allocate` would succeed and leave `spare` blocks for others."""
        num_new = self._num_new(sequence, num_tokens, hits)
        reached = hits[self._first_reached(len(hits) * self.block_size) :]
        num_woken = sum(self._blocks[block_id].ref_count == 0 for block_id in reached)
        return num_new + num_woken + spare <= self.num_available

    def allocate(self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Grows the block table until it has places for `num_tokens`, or holds as many blocks as a
        sequence may; False changes nothing.

        `hits` are what `match` found just now, for a sequence that holds no blocks yet.
        """
        num_new = self._num_new(sequence, num_tokens, hits)
        if num_new == 0 and not hits:
            return True
        if not self.can_allocate(sequence, num_tokens, hits):
            return False
        assert not (hits and sequence.block_table)
        if hits:
            sequence.num_freed_blocks = self._first_reached(len(hits) * self.block_size)
        for block_id in hits[sequence.num_freed_blocks :]:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._cached[block_id]
            block.ref_count += 1
        sequence.block_table.extend(hits)
        sequence.num_published_blocks += len(hits)
        for _ in range(num_new):
            sequence.block_table.append(self._take())
        return True

    def advance(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` places findable, and gives up those
        that no later query reaches. The known tokens of a prompt that lack blocks get others.

        Call it only for known tokens whose KV is written.
        """
        self._publish(sequence, num_tokens)
        first = self._first_reached(num_tokens)
        if first <= sequence.num_freed_blocks:
            return
        for block_id in sequence.block_table[sequence.num_freed_blocks : first]:
            self._give_up(block_id)
        sequence.num_freed_blocks = first
        if sequence.num_tokens > num_tokens + 1:  # a decode gets its block when it is planned
            self.allocate(sequence, sequence.num_tokens)

    def _publish(self, sequence: TokenSequence, num_tokens: int) -> None:
        if not self.prefix_caching:
            return
        num_full = num_tokens // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        self._hash_up_to(sequence, num_full)
        for i in range(sequence.num_published_blocks, num_full):
            self._publish_block(sequence, i)
        sequence.num_published_blocks = num_full

    def release(self, sequence: TokenSequence) -> None:
        """Releases all blocks of a sequence. Published ones stay findable until evicted."""
        # The tail first: it is evicted first, so that prefixes stay longest.
        for block_id in reversed(sequence.block_table[sequence.num_freed_blocks :]):
            self._give_up(block_id)
        sequence.block_table = []
        sequence.num_freed_blocks = 0
        sequence.num_published_blocks = 0

    def _give_up(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.ref_count -= 1
        assert block.ref_count >= 0
        if block.ref_count == 0:
            if block.hash is None:
                self._set_free(block_id)
            else:
                self._cached[block_id] = None

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless the books balance. `block_tables` are all that live, without
        the blocks that were given up.

        Every block is exactly one of free, cached, owned; its reference count equals the tables
        that hold it; the index and the blocks agree. O(blocks); for tests and after a failed step.
        """
        counts = [0] * self.num_blocks
        for table in block_tables:
            if len(set(table)) != len(table):
                raise IntegrityError("a block table holds a block twice")
            for block_id in table:
                counts[block_id] += 1
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is free twice")
        for block_id, block in enumerate(self._blocks):
            if block.ref_count != counts[block_id]:
                raise IntegrityError(
                    f"block {block_id} has {block.ref_count} references, "
                    f"{counts[block_id]} tables hold it"
                )
            states = (block_id in free, block_id in self._cached, block.ref_count > 0)
            if sum(states) != 1:
                raise IntegrityError(f"block {block_id} is (free, cached, owned) = {states}")
            if block_id in free and block.uid != _UNPUBLISHED:
                raise IntegrityError(f"free block {block_id} remembers its content")
            if block_id in self._cached and block.hash is None:
                raise IntegrityError(f"cached block {block_id} cannot be found")
            if block.hash is not None and self._index.get(block.hash) != block_id:
                raise IntegrityError(f"block {block_id} is not at the index entry of its hash")
        if len(self._index) != sum(block.hash is not None for block in self._blocks):
            raise IntegrityError("the index holds an entry that no block knows of")
        if not self._evicted.keys().isdisjoint(self._index):
            raise IntegrityError("an evicted content is in a block")
        if self.offload is not None:
            self.offload.check_integrity()

    def _num_new(self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int]) -> int:
        num_there = len(sequence.block_table) + len(hits)
        wanted = -(-num_tokens // self.block_size)
        if self._held is not None:
            num_freed = sequence.num_freed_blocks
            if hits:
                num_freed = self._first_reached(len(hits) * self.block_size)
            wanted = min(wanted, num_freed + self._held)
        return max(0, wanted - num_there)

    def _take(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._evict(block_id)
        self._blocks[block_id].ref_count = 1
        return block_id

    def _evict(self, block_id: int) -> None:
        block = self._blocks[block_id]
        key = block.hash
        assert key is not None
        has_copy = self.offload is not None and self.offload.offer(key, block.tenant, block_id)
        self._unindex(block, has_copy=has_copy)
        if self._window is None:
            block.forget()
            return
        self._blocks[block_id], self._evicted[key] = Block(), block
        if len(self._evicted) > _EVICTED_PER_BLOCK * self.num_blocks:
            self._evicted.popitem(last=False)

    def _set_free(self, block_id: int) -> None:
        self._blocks[block_id].forget()
        self._free.append(block_id)

    def _unindex(self, block: Block, *, has_copy: bool = False) -> None:
        assert block.hash is not None
        del self._index[block.hash]
        if not has_copy:
            self.prefixes.evicted(block.hash)
        block.hash = None

    def _publish_block(self, sequence: TokenSequence, i: int) -> None:
        block_id = sequence.block_table[i]
        block = self._blocks[block_id]
        assert block.uid == _UNPUBLISHED
        parent = self._blocks[sequence.block_table[i - 1]].uid if i else sequence.tenant
        assert parent != _UNPUBLISHED
        key = sequence.block_hashes[i]
        block.parent = parent
        block.tenant = sequence.tenant
        block.token_ids = self._tokens_of(sequence, i)
        found_id = self._index.get(key)
        if found_id is not None:
            found = self._blocks[found_id]
            if found.holds(parent, block.token_ids):
                block.uid = found.uid
                return
            # Mostly the same content after a parent that was evicted and computed again since: no
            # walk reaches the old entry any more, it would only keep ours from being found. In a
            # true collision either may have the place.
            self._unindex(found)
            if found.ref_count == 0:
                del self._cached[found_id]
                self._set_free(found_id)
        evicted = self._evicted.pop(key, None)
        if evicted is not None and evicted.holds(parent, block.token_ids):
            block.uid = evicted.uid  # what came after it can be found again
        else:
            self._last_uid += 1
            block.uid = self._last_uid
        block.hash = key
        self._index[key] = block_id
        self.prefixes.stored(sequence, i, key)

    def _hash_up_to(self, sequence: TokenSequence, num_full: int) -> None:
        hashes = sequence.block_hashes
        while len(hashes) < num_full:
            parent = hashes[-1] if hashes else root_hash(sequence.tenant)
            hashes.append(self._hasher(parent, self._tokens_of(sequence, len(hashes))))

    def _tokens_of(self, sequence: TokenSequence, i: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[i * self.block_size : (i + 1) * self.block_size])
