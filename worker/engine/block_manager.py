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

KV groups: layers whose queries reach equally far back form groups, and a block holds the tokens of
one group's layers. The blocks of the same tokens, one of each group, are a *row*: a block table has
one row after the other, and rows are published, found and compared as a whole. Any block may
serve any group.

Windows: of a group whose queries reach no more than a window, a sequence gives up the blocks
before it as it is computed. Its table keeps their entries, which are any blocks by then and never
read. A table has at most `held` rows from the widest window on; the blocks that later rows of a
prompt need in groups without a window wait in `spare_blocks`, so that no other sequence takes them.
A prefix hit needs all rows' blocks of groups without a window, and those of its last window of the
others. If all groups have one, the content of the rows before is compared as ever, so it is kept
for a while when its last block is evicted.

With an OffloadTier, which is for a single group, a block that is evicted is offered to it first,
and `load` takes copies back into blocks that a sequence has.

Every operation costs O(1) per block it touches, whatever the size of the pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
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
_EVICTED_PER_BLOCK = 4  # contents that are kept for each block, where all groups have a window


class Content:
    """The published content of a row."""

    __slots__ = ("block_ids", "hash", "parent", "tenant", "token_ids", "uid")

    def __init__(
        self,
        name: BlockHash,
        tenant: str,
        parent: int | str,
        token_ids: tuple[int, ...],
        uid: int,
        num_groups: int,
    ) -> None:
        self.hash = name
        self.tenant = tenant  # of the sequences that have it
        self.parent = parent  # its parent's uid; the tenant for a first row
        self.token_ids = token_ids
        self.uid = uid
        self.block_ids: list[int | None] = [None] * num_groups  # that can be found

    def holds(self, parent: int | str, token_ids: tuple[int, ...]) -> bool:
        return self.parent == parent and self.token_ids == token_ids


class Block:
    """One block's books."""

    __slots__ = ("content", "ref_count", "uid")

    def __init__(self) -> None:
        self.ref_count = 0
        self.uid = _UNPUBLISHED  # of its content, once published
        self.content: Content | None = None  # set while it can be found

    def forget(self) -> None:
        self.uid = _UNPUBLISHED
        self.content = None


class BlockManager:
    """Gives blocks to sequences and takes them back; the only writer of their block tables."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        hasher: BlockHasher = block_hash,
        windows: Sequence[int | None] = (None,),
        held: int | None = None,
        num_offload_blocks: int = 0,
        offload_stores_per_step: int = 256,
    ) -> None:
        """`windows` are those of EngineConfig, `held` its `window_group_blocks`. With
        `num_offload_blocks`, copies of blocks in host memory, names are secure_block_hash's."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hasher = secure_block_hash if num_offload_blocks else hasher
        self.offload: OffloadTier | None = None
        if num_offload_blocks:
            self.offload = OffloadTier(
                num_offload_blocks, offload_stores_per_step, self._on_copy_lost
            )
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the front is evicted first
        self._index: dict[BlockHash, Content] = {}  # each has a block
        self._last_uid = _UNPUBLISHED
        self.prefixes = PrefixTracker()
        # Groups without a window first: the first group's block knows the parent of the next row.
        # If all have windows, the last full block of a sequence stays for that.
        assert sorted(windows, key=lambda window: window is not None) == list(windows)
        self._windows = tuple(
            None if window is None else max(window, block_size + 1) for window in windows
        )
        self._num_full = self._windows.count(None)
        self._widest = max((window for window in self._windows if window is not None), default=None)
        self._held = held
        self._evicted: OrderedDict[BlockHash, Content] = OrderedDict()  # the oldest first
        self.row_blocks = len(self._windows)  # that a sequence takes when its last row is full
        # A sequence may have a row to publish, or blocks to give up, at these numbers of computed
        # tokens modulo block size.
        self.turns = frozenset(
            (0 if window is None else (window - 1) % block_size)
            for window in (None, *self._windows)
        )

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

    def tokens_in(self, table: Sequence[int]) -> int:
        """Returns for how many tokens a block table has places."""
        return len(table) // self.row_blocks * self.block_size

    def held(self, sequence: TokenSequence) -> list[int]:
        """Returns the blocks that a sequence holds."""
        return [
            *self._reached(sequence.block_table, sequence.num_passed_tokens),
            *sequence.spare_blocks,
        ]

    def num_of_none_but(self, sequences: Iterable[TokenSequence], hits: Sequence[int]) -> int:
        """Returns how many blocks no sequence but these holds, without those of `hits`."""
        counts = Counter(block_id for sequence in sequences for block_id in self.held(sequence))
        for block_id in self._reached(hits, self.tokens_in(hits)):
            counts.pop(block_id, None)
        return sum(self._blocks[block_id].ref_count == num for block_id, num in counts.items())

    def ref_count(self, block_id: int) -> int:
        return self._blocks[block_id].ref_count

    def match(self, sequence: TokenSequence) -> list[int]:
        """Returns the longest run of findable rows that holds the sequence's first tokens.

        Blocks that no later query reaches may be missing. Never covers a token that has to be
        computed: see Sequence.num_skippable_tokens. Changes nothing: `allocate` takes the blocks.
        """
        if not self.prefix_caching:
            return []
        hits: list[int | None] = []
        num_rows = sequence.num_skippable_tokens // self.block_size
        num_hits = 0
        lacking: dict[int, int] = {}  # by group, the last row whose block is not there
        parent: int | str = sequence.tenant
        for i in range(num_rows):
            self._hash_up_to(sequence, i + 1)
            key = sequence.block_hashes[i]
            content = self._index.get(key) or self._evicted.get(key)
            if content is None or not content.holds(parent, self._tokens_of(sequence, i)):
                break
            block_ids = content.block_ids
            if None in block_ids:
                if None in block_ids[: self._num_full]:
                    break
                lacking |= {g: i for g, block_id in enumerate(block_ids) if block_id is None}
            hits += block_ids
            parent = content.uid
            num_computed = (i + 1) * self.block_size
            if all(row < self._first_row(g, num_computed) for g, row in lacking.items()):
                num_hits = i + 1
        reached = set(self._reached_places(num_hits * self.row_blocks, num_hits * self.block_size))
        return [
            block_id if i in reached and block_id is not None else _UNREACHED
            for i, block_id in enumerate(hits[: num_hits * self.row_blocks])
        ]

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

    def _first_row(self, group: int, num_computed: int) -> int:
        """Returns the first row that a group's queries after `num_computed` tokens reach."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_computed - window + 1) // self.block_size

    def _reached_places(self, length: int, num_computed: int) -> Iterable[int]:
        """Returns the places in a block table of that length that queries after `num_computed`
        tokens reach, in order."""
        if self._widest is None:
            return range(length)
        num_groups = self.row_blocks
        first_rows = [self._first_row(group, num_computed) for group in range(num_groups)]
        begin = min(first_rows) * num_groups
        return [i for i in range(begin, length) if i // num_groups >= first_rows[i % num_groups]]

    def _reached(self, table: Sequence[int], num_computed: int) -> Sequence[int]:
        """Returns the blocks of a table that queries after `num_computed` tokens reach."""
        if self._widest is None:
            return table
        return [table[i] for i in self._reached_places(len(table), num_computed)]

    def can_allocate(
        self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int] = (), spare: int = 0
    ) -> bool:
        """Returns whether `allocate` would succeed and leave `spare` blocks for others."""
        _, num_taken = self._growth(sequence, num_tokens, hits)
        num_woken = sum(
            self._blocks[block_id].ref_count == 0
            for block_id in self._reached(hits, self.tokens_in(hits))
        )
        return num_taken + num_woken + spare <= self.num_available

    def allocate(self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int] = ()) -> bool:
        """Grows the block table until it has places for `num_tokens`, or as many rows as a sequence
        may have; False changes nothing. What the rows after them need for sure it takes as well.

        `hits` are what `match` found just now, for a sequence that holds no blocks yet.
        """
        num_rows, num_taken = self._growth(sequence, num_tokens, hits)
        if num_rows == num_taken == 0 and not hits:
            return True
        if not self.can_allocate(sequence, num_tokens, hits):
            return False
        assert not (hits and sequence.block_table)
        if hits:
            sequence.num_passed_tokens = self.tokens_in(hits)
            sequence.num_published_blocks = len(hits) // self.row_blocks
        for block_id in self._reached(hits, self.tokens_in(hits)):
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._cached[block_id]
            block.ref_count += 1
        sequence.block_table.extend(hits)
        spare = sequence.spare_blocks
        taken = [self._take() for _ in range(num_taken)]
        for _ in range(num_rows):
            for window in self._windows:
                waits = window is None and spare
                sequence.block_table.append(spare.pop() if waits else taken.pop())
        spare.extend(taken)
        return True

    def _growth(
        self, sequence: TokenSequence, num_tokens: int, hits: Sequence[int]
    ) -> tuple[int, int]:
        """Returns by how many rows `allocate` grows a table, and how many blocks it takes: those of
        the rows, without the spare ones, and the spare ones that are missing."""
        there = (len(sequence.block_table) + len(hits)) // self.row_blocks
        wanted = -(-num_tokens // self.block_size) - there
        if wanted <= 0:
            return 0, 0
        if self._held is None or self._widest is None:
            return wanted, wanted * self.row_blocks
        passed = self.tokens_in(hits) if hits else sequence.num_passed_tokens
        first_row = max(0, passed - self._widest + 1) // self.block_size
        num_rows = max(0, min(wanted, first_row + self._held - there))
        num_full = max(0, wanted * self._num_full - len(sequence.spare_blocks))
        return num_rows, num_full + num_rows * (self.row_blocks - self._num_full)

    def advance(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Makes the full blocks among the first `num_tokens` places findable, and gives up those
        that no later query reaches. The known tokens of a prompt that lack blocks get others.

        Call it only for known tokens whose KV is written.
        """
        self._publish(sequence, num_tokens)
        if self._widest is None:
            return
        passed, sequence.num_passed_tokens = sequence.num_passed_tokens, num_tokens
        for group in range(self._num_full, self.row_blocks):
            for row in range(self._first_row(group, passed), self._first_row(group, num_tokens)):
                self._give_up(sequence.block_table[row * self.row_blocks + group])
        if sequence.num_tokens > num_tokens + 1:  # a decode gets its row when it is planned
            self.allocate(sequence, sequence.num_tokens)

    def _publish(self, sequence: TokenSequence, num_tokens: int) -> None:
        if not self.prefix_caching:
            return
        num_full = num_tokens // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        self._hash_up_to(sequence, num_full)
        for i in range(sequence.num_published_blocks, num_full):
            self._publish_row(sequence, i)
        sequence.num_published_blocks = num_full

    def release(self, sequence: TokenSequence) -> None:
        """Releases all blocks of a sequence. Published ones stay findable until evicted."""
        # The tail first: it is evicted first, so that prefixes stay longest.
        for block_id in reversed(self.held(sequence)):
            self._give_up(block_id)
        sequence.block_table, sequence.spare_blocks = [], []
        sequence.num_passed_tokens = 0
        sequence.num_published_blocks = 0

    def _give_up(self, block_id: int) -> None:
        block = self._blocks[block_id]
        block.ref_count -= 1
        assert block.ref_count >= 0
        if block.ref_count == 0:
            if block.content is None:
                self._set_free(block_id)
            else:
                self._cached[block_id] = None

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Raises IntegrityError unless the books balance. `block_tables` are all that live, as
        `held` returns them.

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
            content = block.content
            if block_id in self._cached and content is None:
                raise IntegrityError(f"cached block {block_id} cannot be found")
            if content is not None and (
                self._index.get(content.hash) is not content or block_id not in content.block_ids
            ):
                raise IntegrityError(f"block {block_id} is not at the index entry of its hash")
        found = [
            block_id
            for content in self._index.values()
            for block_id in content.block_ids
            if block_id is not None
        ]
        if len(found) != sum(block.content is not None for block in self._blocks):
            raise IntegrityError("the index holds an entry that no block knows of")
        if not self._evicted.keys().isdisjoint(self._index):
            raise IntegrityError("an evicted content is in a block")
        if self.offload is not None:
            self.offload.check_integrity()

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
        content = block.content
        assert content is not None
        group = content.block_ids.index(block_id)
        has_copy = self.offload is not None and self.offload.offer(
            content.hash, content.tenant, block_id
        )
        content.block_ids[group] = None
        block.forget()
        if group == 0 and not has_copy:
            self.prefixes.evicted(content.hash)
        if any(other is not None for other in content.block_ids):
            return
        del self._index[content.hash]
        if self._num_full:
            return
        self._evicted[content.hash] = content
        if len(self._evicted) > _EVICTED_PER_BLOCK * self.num_blocks:
            self._evicted.popitem(last=False)

    def _set_free(self, block_id: int) -> None:
        self._blocks[block_id].forget()
        self._free.append(block_id)

    def _unindex(self, content: Content) -> None:
        del self._index[content.hash]
        if content.block_ids[0] is not None:
            self.prefixes.evicted(content.hash)
        for block_id in content.block_ids:
            if block_id is None:
                continue
            block = self._blocks[block_id]
            block.content = None
            if block.ref_count == 0:
                del self._cached[block_id]
                self._set_free(block_id)

    def _publish_row(self, sequence: TokenSequence, i: int) -> None:
        begin = i * self.row_blocks
        block_ids = sequence.block_table[begin : begin + self.row_blocks]
        before = sequence.block_table[begin - self.row_blocks] if i else None
        parent = sequence.tenant if before is None else self._blocks[before].uid
        assert parent != _UNPUBLISHED
        key, token_ids = sequence.block_hashes[i], self._tokens_of(sequence, i)
        content = self._index.get(key)
        if content is not None and not content.holds(parent, token_ids):
            # Mostly the same content after a parent that was evicted and computed again since: no
            # walk reaches the old entry any more, it would only keep ours from being found. In a
            # true collision either may have the place.
            self._unindex(content)
            content = None
        if content is None:
            evicted = self._evicted.pop(key, None)
            if evicted is not None and evicted.holds(parent, token_ids):
                content = evicted  # what came after it can be found again
            else:
                self._last_uid += 1
                content = Content(
                    key, sequence.tenant, parent, token_ids, self._last_uid, self.row_blocks
                )
            self._index[key] = content
        for group, block_id in enumerate(block_ids):
            block = self._blocks[block_id]
            assert block.uid == _UNPUBLISHED
            block.uid = content.uid
            if content.block_ids[group] is not None:
                continue  # an alias
            content.block_ids[group], block.content = block_id, content
            if group == 0:
                self.prefixes.stored(sequence, i, self.block_size, key)

    def _hash_up_to(self, sequence: TokenSequence, num_full: int) -> None:
        hashes = sequence.block_hashes
        while len(hashes) < num_full:
            parent = hashes[-1] if hashes else root_hash(sequence.tenant)
            hashes.append(self._hasher(parent, self._tokens_of(sequence, len(hashes))))

    def _tokens_of(self, sequence: TokenSequence, i: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[i * self.block_size : (i + 1) * self.block_size])
