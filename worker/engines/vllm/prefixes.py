"""VllmPrefixes: which prefixes vLLM's cache holds, from the events of its blocks.

vLLM names a block by a hash of its own. An event of blocks that it stores has their tokens, the
name of the block before them, and, of a prompt's first block, the salt: its tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared.prefixes import PREFIX_STEP, next_digest, root_digest
from worker.engine.measures import PrefixChanges
from worker.engine.prefix_tracker import PrefixTracker

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored

# Kinds of layers that keep all of a sequence: a prefix whose blocks they lack is not found.
WHOLE_KINDS = ("full_attention", "mla_attention", "sink_full_attention")


@dataclass(slots=True)
class _Block:
    digest: bytes  # of the last step that ends in this block or before it
    rest: Sequence[int]  # tokens after that step, fewer than one
    copies: int = 0  # vLLM computes an equal block twice when two prompts are computed at once


class VllmPrefixes:
    """Takes the events of one LLMEngine in their order. Blocks whose beginning is not known, of an
    adapter or outside the device's memory are left out: no job is sent here for these."""

    def __init__(self) -> None:
        self._tracker = PrefixTracker()
        self._blocks: dict[Any, _Block] = {}  # by vLLM's hashes
        self._group: int | None = None  # of layers, whose blocks are followed

    def drain(self) -> PrefixChanges:
        """Returns as PrefixTracker.drain."""
        return self._tracker.drain()

    def take(self, events: Sequence[Any]) -> None:
        """Takes events of vLLM's: of blocks stored, removed, or of all that are cleared."""
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved" if event.medium == "GPU" and event.group_idx == self._group:
                    for name in event.block_hashes:
                        self._remove(name)
                case "AllBlocksCleared":
                    for name in list(self._blocks):
                        self._forget(name)

    def _store(self, event: BlockStored) -> None:
        size, names = event.block_size, event.block_hashes
        if self._group is None and event.kv_cache_spec_kind in WHOLE_KINDS:
            self._group = event.group_idx
        is_followed = event.medium == "GPU" and event.group_idx == self._group
        if not is_followed or event.lora_name or len(event.token_ids) != size * len(names):
            return
        before = self._before(event)
        for at, name in enumerate(names):
            if before is None:
                return
            block = self._blocks.get(name)
            if block is None:
                digests, block = _next(before, event.token_ids[at * size : (at + 1) * size])
                self._blocks[name] = block
                self._tracker.hold(name, digests)
            block.copies += 1
            before = block

    def _before(self, event: BlockStored) -> _Block | None:
        """Returns the block before these; None: unknown."""
        if event.parent_block_hash is not None:
            return self._blocks.get(event.parent_block_hash)
        keys = event.extra_keys[0] if event.extra_keys else None
        if keys is None or len(keys) != 1 or not isinstance(keys[0], str):
            return None  # not of a job's prompt alone
        return _Block(root_digest(keys[0]), ())

    def _remove(self, name: Any) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.copies -= 1
        if block.copies == 0:
            self._forget(name)

    def _forget(self, name: Any) -> None:
        del self._blocks[name]
        self._tracker.evicted(name)


def _next(before: _Block, token_ids: Sequence[int]) -> tuple[list[bytes], _Block]:
    """Returns the digests that end in the block of these tokens, and the block."""
    digest, rest = before.digest, (*before.rest, *token_ids)
    digests = []
    while len(rest) >= PREFIX_STEP:
        digest = next_digest(digest, rest[:PREFIX_STEP])
        digests.append(digest)
        rest = rest[PREFIX_STEP:]
    return digests, _Block(digest, rest)
