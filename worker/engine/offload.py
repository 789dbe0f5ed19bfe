"""OffloadTier: copies of blocks that the pool has evicted, in host memory and perhaps on a disk.

        pool --- evicted ---> host memory --- each, in a thread ---> disk
         ^                        |                                   |
         +------- loaded ---------+-----------------------------------+

Keys are the names of the pool's index (block_hash.py), here by `secure_block_hash`: a copy has no
parent left to compare, so that an equal name alone has to mean equal tokens. A copy is found by its
own tenant only. A block that is loaded keeps its copy: when it is evicted again, nothing is copied.

The tier is books: a slot is a place of one block in host memory, and a plan's `Transfers` are the
copies that the runner makes, in their order, before it computes the step. The copy of a step that
failed is not trusted, see `undo`.

Both places are bounded, and shared by tenants: when one is full, the tenant with the most blocks
gives up its least recently used one (TenantLRU). The copies of a plan are bounded too, as decodes
wait for them: its later ones replace its first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from worker.engine.errors import IntegrityError

if TYPE_CHECKING:  # a batch has transfers with ENGINE=vllm too, whose interpreter has no xxhash
    from worker.engine.block_hash import BlockHash

V = TypeVar("V")


class Store(NamedTuple):
    """Copies a block of the pool into a slot."""

    key: BlockHash
    block_id: int
    slot: int


class Load(NamedTuple):
    """Copies a slot, or what OffloadDisk.read returned, into a block of the pool."""

    source: object
    block_id: int


Transfers = tuple[Store | Load, ...]


class OffloadDisk(Protocol):
    """Blocks on a disk. Writes happen in a thread; all else in the engine's."""

    reads_per_step: int  # that delay its decodes little

    def __len__(self) -> int: ...

    def holds(self, key: BlockHash, tenant: str) -> bool: ...

    def write(self, key: BlockHash, tenant: str, slot: int) -> None:
        """Writes a slot, which must not change until `drain` returns it. Returns at once."""
        ...

    def read(self, key: BlockHash, tenant: str) -> object | None:
        """Returns the content, for a Load; None if the file is gone or damaged: then it is not
        held any more."""
        ...

    def drain(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Returns the keys whose writes have ended, well or not, and those whose files are gone,
        since the last call."""
        ...


class TenantLRU(Generic[V]):
    """Values by key, and which one to give up: of the tenant that has the most, the least recently
    used one. So no tenant can push another below an equal share. Every operation is O(1)."""

    def __init__(self) -> None:
        self._values: dict[str, OrderedDict[BlockHash, V]] = {}
        self._tenants: dict[BlockHash, str] = {}
        self._by_count: dict[int, dict[str, None]] = {}  # tenants; no empty ones
        self._most = 0

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._tenants

    def num_of(self, tenant: str) -> int:
        return len(self._values.get(tenant, ()))

    def get(self, key: BlockHash, tenant: str) -> V | None:
        """Returns the tenant's value; None where it has none of this key."""
        return self._values[tenant].get(key) if tenant in self._values else None

    def add(self, key: BlockHash, tenant: str, value: V, *, is_oldest: bool = False) -> None:
        """Adds a key that is not there, as the most recently used, or as the least."""
        assert key not in self._tenants
        of_tenant = self._values.setdefault(tenant, OrderedDict())
        of_tenant[key] = value
        if is_oldest:
            of_tenant.move_to_end(key, last=False)
        self._tenants[key] = tenant
        self._moved(tenant, len(of_tenant) - 1, len(of_tenant))

    def touch(self, key: BlockHash) -> None:
        self._values[self._tenants[key]].move_to_end(key)

    def values(self) -> Iterable[V]:
        return (value for of_tenant in self._values.values() for value in of_tenant.values())

    def remove(self, key: BlockHash) -> tuple[str, V]:
        """Returns its tenant and its value."""
        tenant = self._tenants.pop(key)
        of_tenant = self._values[tenant]
        value = of_tenant.pop(key)
        if not of_tenant:
            del self._values[tenant]
        self._moved(tenant, len(of_tenant) + 1, len(of_tenant))
        return tenant, value

    def next_victim(self, adding: str) -> tuple[BlockHash, str]:
        """Returns the key to give up, and its tenant, before a key of the tenant `adding` is added:
        its own where no tenant has more. There must be one."""
        most = self._by_count[self._most]
        tenant = adding if adding in most else next(iter(most))
        return next(iter(self._values[tenant])), tenant

    def _moved(self, tenant: str, before: int, after: int) -> None:
        if before:
            del self._by_count[before][tenant]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[tenant] = None
        # The counts of a tenant change by one.
        if after > self._most or self._most not in self._by_count:
            self._most = after


@dataclass(slots=True)
class OffloadCounts:
    """Since the engine's start."""

    stored_blocks: int = 0  # copied out of the pool
    loaded_blocks: int = 0  # copied into it
    unwritten_blocks: int = 0  # given up while there is a disk that does not have them


class OffloadTier:
    """Finds copies by key, and decides which blocks have one."""

    def __init__(
        self, num_slots: int, stores_per_step: int, on_lost: Callable[[BlockHash], None]
    ) -> None:
        """`on_lost` gets the key of a block that has no copy any more."""
        self.disk: OffloadDisk | None = None
        self.counts = OffloadCounts()
        self._num_slots = num_slots
        self._most_stores = min(num_slots, stores_per_step)
        self._on_lost = on_lost
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: TenantLRU[int] = TenantLRU()
        self._unwritten: dict[BlockHash, None] = {}  # found ones that the disk is to get
        self._writing: dict[BlockHash, tuple[str, int]] = {}  # tenant and slot
        self._pending: dict[int, Store | Load] = {}  # of the plan being made, by number, in order
        self._numbers = count()
        self._stores: dict[BlockHash, int] = {}  # those of them that no Load needs: their numbers
        self._num_read = 0  # files, for it
        self._unsettled: dict[int, BlockHash] = {}  # slots whose copy no collected step has made

    @property
    def num_blocks(self) -> int:
        """Copies in host memory."""
        return self._num_slots - len(self._free)

    @property
    def num_disk_blocks(self) -> int:
        return len(self.disk) if self.disk is not None else 0

    def offer(self, key: BlockHash, tenant: str, block_id: int) -> bool:
        """Takes in a block that is about to be reused; returns whether it has a copy now.

        The content must be whole by the steps launched so far. Blocks of a sequence come from its
        last one on, so that its first ones are given up last.
        """
        self._write_some()
        if key in self._slots:
            self._slots.touch(key)
            return True
        if key in self._writing:
            return True
        if len(self._stores) == self._most_stores:  # the oldest is worth the least
            self._drop(next(iter(self._stores)))
        slot = self._take_slot(tenant)
        if slot is None:
            return self.disk is not None and self.disk.holds(key, tenant)
        self._slots.add(key, tenant, slot)
        self._unsettled[slot] = key
        self._stores[key] = self._add(Store(key, block_id, slot))
        return True

    def holds(self, key: BlockHash, tenant: str) -> bool:
        """Returns whether `load` would succeed, now or in a later plan, unless a file has been
        damaged."""
        if self._slots.get(key, tenant) is not None:
            return True
        if key in self._writing:
            return self._writing[key][0] == tenant
        return self.disk is not None and self.disk.holds(key, tenant)

    def load(self, key: BlockHash, tenant: str, block_id: int) -> bool:
        """Has the copy loaded into a block, before the plan being made is computed. Returns whether
        it is: a plan has few reads."""
        source: object | None = self._slots.get(key, tenant)
        if source is None and key in self._writing and self._writing[key][0] == tenant:
            source = self._writing[key][1]
        if source is None and self.disk is not None and self._num_read < self.disk.reads_per_step:
            self._num_read += 1
            source = self.disk.read(key, tenant)
        if source is None:
            return False
        self._stores.pop(key, None)
        self._add(Load(source, block_id))
        return True

    def take_transfers(self) -> Transfers:
        """Returns the copies of the plan; it must be launched, and then committed or undone."""
        transfers, self._num_read = tuple(self._pending.values()), 0
        self._pending.clear()
        self._stores.clear()
        return transfers

    def commit(self, transfers: Transfers) -> None:
        """Trusts the copies of a step that was collected."""
        num_stores = sum(isinstance(item, Store) for item in transfers)
        self.counts.stored_blocks += num_stores
        self.counts.loaded_blocks += len(transfers) - num_stores
        for item in transfers:
            if isinstance(item, Store) and self._unsettled.get(item.slot) == item.key:
                del self._unsettled[item.slot]
                if self.disk is not None:
                    self._unwritten[item.key] = None
        self._write_some()

    def undo(self, transfers: Transfers) -> None:
        """Forgets the copies of a step that failed: it may have made some of them, and written over
        the blocks since."""
        for item in transfers:
            if isinstance(item, Store) and self._unsettled.get(item.slot) == item.key:
                self._drop(item.key)

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Keeps the copies of a sequence's blocks, its first ones the longest."""
        for key in reversed(keys):
            if key in self._slots:
                self._slots.touch(key)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each slot is exactly one of free, found, being written."""
        slots = [*self._free, *self._slots.values(), *(slot for _, slot in self._writing.values())]
        if sorted(slots) != list(range(self._num_slots)):
            raise IntegrityError("a slot of the offload tier has several uses, or none")
        if any(key not in self._slots for key in self._unwritten):
            raise IntegrityError("the disk is to get a copy that is gone")
        if not self._unsettled.keys() <= set(self._slots.values()):
            raise IntegrityError("a slot of the offload tier awaits a copy that cannot be found")

    def _take_slot(self, tenant: str) -> int | None:
        """Returns a slot for a copy of the tenant's; None where all are being written."""
        if not self._free and len(self._slots):
            self._drop(self._slots.next_victim(tenant)[0])
        return self._free.pop() if self._free else None

    def _add(self, item: Store | Load) -> int:
        """Returns its number in the plan."""
        number = next(self._numbers)
        self._pending[number] = item
        return number

    def _drop(self, key: BlockHash) -> None:
        """Frees a slot. Copies of this plan from and to it come before what replaces it; one that
        nothing needs is not made."""
        tenant, slot = self._slots.remove(key)
        if key in self._stores:
            del self._pending[self._stores.pop(key)]
        self._unsettled.pop(slot, None)
        self._unwritten.pop(key, None)
        self._free.append(slot)
        if not self.holds(key, tenant):
            self.counts.unwritten_blocks += self.disk is not None
            self._on_lost(key)

    def _write_some(self) -> None:
        """Has the disk write the oldest copies that it lacks, half of the slots at a time: they
        cannot be given up meanwhile."""
        if self.disk is None:
            return
        ended, gone = self.disk.drain()
        for key in ended:
            self._slots.add(key, *self._writing.pop(key), is_oldest=True)
        for key in gone:
            if key not in self._slots and key not in self._writing:
                self._on_lost(key)
        while self._unwritten and len(self._writing) < max(1, self._num_slots // 2):
            key = next(iter(self._unwritten))
            del self._unwritten[key]
            tenant, slot = self._slots.remove(key)
            if self.disk.holds(key, tenant):
                self._slots.add(key, tenant, slot, is_oldest=True)
                continue
            self._writing[key] = (tenant, slot)
            self.disk.write(key, tenant, slot)
