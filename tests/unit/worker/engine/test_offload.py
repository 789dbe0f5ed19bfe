"""The offload tier: what it keeps, what it gives up, and that no block is read without its tokens.

ContentRunner has the content of each block and slot, and checks the blocks that a step reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shared.prefixes import DIGEST_BYTES, PREFIX_STEP, digests_of_prompt
from tests.unit.worker.engine.scripted_runner import (
    ScriptedHandle,
    ScriptedRunner,
    Story,
    make_config,
    make_request,
    run_to_end,
    tell,
)
from tests.unit.worker.engine.test_block_manager import fill, make_sequence
from worker.engine.batch import ScheduledBatch
from worker.engine.block_hash import BlockHash
from worker.engine.block_manager import BlockManager
from worker.engine.engine import Engine
from worker.engine.errors import OutOfMemory
from worker.engine.offload import Load, OffloadTier, Store, TenantLRU

SIZE = 4
Content = dict[int, object]  # what is written at each place of a block


@dataclass
class ContentRunner(ScriptedRunner):
    """Writes at each place which tokens are up to there, of which tenant."""

    window: int | None = None  # of its queries
    num_loaded: int = 0
    wrong: list[object] = field(default_factory=list)  # an engine computes a step that raises again
    fault: Callable[[], str] = lambda: ""
    blocks: dict[int, Content] = field(default_factory=dict)
    slots: dict[int, Content] = field(default_factory=dict)

    def launch(self, batch: ScheduledBatch) -> ScriptedHandle:
        fault = self.fault()
        if fault == "before":
            raise ValueError("nothing was done")
        for item in batch.transfers:
            if isinstance(item, Store):
                self.slots[item.slot] = dict(self.blocks[item.block_id])
            else:
                source = item.source
                content = self.slots[source] if isinstance(source, int) else source
                assert isinstance(content, dict)
                self.blocks[item.block_id] = dict(content)
                self.num_loaded += 1
        for sequence in batch.sequences:
            known = [*sequence.prompt_token_ids, *range(100, 100 + sequence.end)]
            reached = max(0, sequence.start - (self.window or sequence.start) + 1)
            for position in range(reached if self.window else 0, sequence.end):
                block = self.blocks.setdefault(sequence.block_table[position // SIZE], {})
                written = (sequence.tenant, hash(tuple(known[: position + 1])))
                if position >= sequence.start:
                    block[position % SIZE] = written
                elif block.get(position % SIZE) != written:
                    self.wrong.append((len(self.steps), sequence, position))
        if fault == "after":
            raise OutOfMemory("the step wrote its part")
        return super().launch(batch)


@dataclass
class MemoryDisk:
    """An OffloadDisk whose writes end when the test wants, and whose files may be spoilt."""

    runner: ContentRunner
    rng: random.Random
    most: int = 20
    reads_per_step: int = 2
    loses: float = 0.1  # of reads and writes
    files: dict[tuple[BlockHash, str], Content] = field(default_factory=dict)
    writing: list[tuple[BlockHash, str, int]] = field(default_factory=list)
    ended: list[BlockHash] = field(default_factory=list)
    gone: list[BlockHash] = field(default_factory=list)
    num_read: int = 0

    def __len__(self) -> int:
        return len(self.files)

    def holds(self, key: BlockHash, tenant: str) -> bool:
        return (key, tenant) in self.files

    def write(self, key: BlockHash, tenant: str, slot: int) -> None:
        self.writing.append((key, tenant, slot))

    def read(self, key: BlockHash, tenant: str) -> object | None:
        if self.rng.random() < self.loses and self.files.pop((key, tenant), None):
            self.gone.append(key)
        content = self.files.get((key, tenant))
        self.num_read += content is not None
        return content

    def drain(self) -> tuple[list[BlockHash], list[BlockHash]]:
        ended, self.ended = self.ended, []
        gone, self.gone = self.gone, []
        return ended, gone

    def end_writes(self) -> None:
        """Takes the slots' content only now: no step may have written into them meanwhile."""
        for key, tenant, slot in self.writing:
            if self.rng.random() >= self.loses:
                self.files[key, tenant] = dict(self.runner.slots[slot])
            self.ended.append(key)
            while len(self.files) > self.most:
                oldest = next(iter(self.files))
                del self.files[oldest]
                self.gone.append(oldest[0])
        self.writing.clear()


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("seed", range(3))
def test_no_step_reads_a_block_without_its_tokens(
    seed: int, window: int | None, lookahead: int, has_disk: bool
) -> None:
    """Conversations of several tenants in a pool and a tier too small for them, with preemptions,
    cancels, and steps that fail before or after they have copied."""
    rng = random.Random(seed)
    since = 0  # steps without a fault; several faults in a row would end the engine

    def fault() -> str:
        nonlocal since
        since += 1
        if since < 6 or rng.random() < 0.9:
            return ""
        since = 0
        return rng.choice(["before", "after"])

    runner = ContentRunner(window=window, fault=fault)
    config = make_config(
        num_blocks=24,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        num_offload_blocks=(2, 16, 40)[seed],
        offload_stores_per_step=(100, 3, 6)[seed],
        lookahead=lookahead,
        windows=(window,),
    )
    disk = MemoryDisk(runner, rng) if has_disk else None
    engine = Engine(config, runner, disk=disk)
    system = [7] * 9  # the same for all
    conversations = [
        [*system, *(rng.randrange(1, 90) for _ in range(rng.randrange(1, 20)))] for _ in range(8)
    ]
    live: dict[str, int] = {}
    stories: dict[str, Story] = {}
    number = 0
    for _ in range(900):
        idle = sorted(set(range(8)) - set(live.values()))
        if idle and rng.random() < 0.3:
            i, request_id, number = rng.choice(idle), f"r{number}", number + 1
            if len(conversations[i]) > 60:
                conversations[i] = conversations[i][:12]
            engine.add(
                make_request(
                    request_id,
                    conversations[i],
                    tenant=f"tenant{i % 3}",
                    priority=rng.randrange(2),
                    max_tokens=rng.randrange(1, 12),
                )
            )
            live[request_id] = i
        if live and rng.random() < 0.02:
            engine.cancel(request_id := rng.choice(sorted(live)))
            del live[request_id]
        if engine.has_unfinished():
            tell(stories, engine.step())
            engine.check_integrity()
            assert not runner.wrong
        for request_id in [r for r in live if r in stories and stories[r].last.finish_reason]:
            story, i = stories[request_id], live.pop(request_id)
            if story.last.error is None:
                assert story.token_ids == list(range(100, 100 + len(story.token_ids)))
                conversations[i] += [*story.token_ids, rng.randrange(1, 90)]
        if disk is not None and rng.random() < 0.5:
            disk.end_writes()
    stats = engine.stats()
    assert runner.num_loaded or config.num_offload_blocks == 2
    assert stats.failed_steps
    assert stats.offload_blocks <= config.num_offload_blocks
    assert disk is None or (disk.num_read and stats.offload_disk_blocks <= disk.most)


@pytest.mark.parametrize("budget", [3, 12, 100])
def test_evicted_prompts_are_loaded_and_not_computed_again(budget: int) -> None:
    runner = ContentRunner()
    config = make_config(num_blocks=12, max_num_batched_tokens=budget, num_offload_blocks=30)
    engine = Engine(config, runner)
    prompts = {name: [ord(name)] * 33 for name in "abc"}  # of nine blocks
    for turn in range(2):
        for name, prompt in prompts.items():
            engine.add(make_request(f"{name}{turn}", prompt))
            stories = run_to_end(engine)
            cached = stories[f"{name}{turn}"].outputs[-1].num_cached_tokens
            assert cached == (32 if turn else 0)
    stats = engine.stats()
    assert stats.prefix_query_tokens - stats.prefix_hit_tokens == 3 * 33 + 3
    assert stats.offload_loaded_blocks > 3 * 5
    for step in runner.steps:
        assert sum(step.counts.values()) <= budget


def test_a_step_with_decodes_loads_no_more_tokens_than_it_may_compute() -> None:
    runner = ContentRunner()
    config = make_config(num_blocks=40, max_num_batched_tokens=8, num_offload_blocks=60)
    engine = Engine(config, runner)
    for i in range(2):  # the second pushes the first out
        engine.add(make_request(f"p{i}", [i + 1] * 120))
        run_to_end(engine)
    engine.add(make_request("decodes", [9] * 3, max_tokens=30))
    tell(stories := {}, engine.step())
    engine.add(make_request("again", [1] * 120))
    loaded, num_steps = runner.num_loaded, len(runner.steps)
    run_to_end(engine, stories=stories)
    assert runner.num_loaded > loaded + 8
    steps = runner.steps[num_steps:]
    assert sum(len(step.counts) == 1 for step in steps) >= (runner.num_loaded - loaded) // 2 - 1
    assert all(len(step.order) >= 1 for step in steps[:20]), "the decode had its token in each"


def test_a_step_reads_few_files_and_the_next_ones_read_the_rest() -> None:
    runner = ContentRunner()
    disk = MemoryDisk(runner, random.Random(2), most=1000, loses=0.0)
    engine = Engine(make_config(num_blocks=12, num_offload_blocks=100), runner, disk=disk)
    for i in range(2 * (number := 24)):
        engine.add(make_request(f"r{i}", [i % number + 1] * 33))
        while engine.has_unfinished():
            num_read, num_steps = disk.num_read, len(runner.steps)
            engine.step()
            assert disk.num_read - num_read <= disk.reads_per_step
            assert len(runner.steps) == num_steps + 1, "a step may do nothing but load"
            disk.end_writes()
    stats = engine.stats()
    assert disk.num_read > 80
    assert stats.offload_unwritten_blocks == 0
    assert stats.prefix_hit_tokens == number * 32


def test_tenants_do_not_find_each_others_copies() -> None:
    runner = ContentRunner()
    engine = Engine(make_config(num_blocks=12, num_offload_blocks=60), runner)
    for request_id, tenant in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b"), ("c0", "c")):
        engine.add(make_request(request_id, [5] * 33, tenant=tenant))
        cached = run_to_end(engine)[request_id].outputs[-1].num_cached_tokens
        assert cached == (32 if request_id.endswith("1") else 0)


def test_a_tenant_of_many_prompts_leaves_another_its_copies() -> None:
    runner = ContentRunner()
    engine = Engine(make_config(num_blocks=12, num_offload_blocks=20), runner)
    engine.add(make_request("small", [5] * 33, tenant="small"))
    run_to_end(engine)
    for i in range(20):
        engine.add(make_request(f"large{i}", [10 + i] * 33, tenant="large"))
        run_to_end(engine)
    engine.add(make_request("again", [5] * 33, tenant="small"))
    assert run_to_end(engine)["again"].outputs[-1].num_cached_tokens == 32


def test_the_copies_of_a_step_that_failed_are_forgotten() -> None:
    lost: list[BlockHash] = []
    tier = OffloadTier(4, 4, lost.append)
    keys = [BlockHash(bytes([i])) for i in range(2)]
    assert tier.offer(keys[0], "a", 1)
    tier.commit(tier.take_transfers())
    assert tier.offer(keys[1], "a", 2)
    tier.undo(tier.take_transfers())
    assert lost == [keys[1]]
    assert tier.load(keys[0], "a", 7)
    assert not tier.load(keys[1], "a", 7)
    tier.check_integrity()
    tier.undo(tier.take_transfers())
    assert (tier.counts.stored_blocks, tier.counts.loaded_blocks) == (1, 0)
    assert tier.load(keys[0], "a", 7)
    tier.commit(tier.take_transfers())
    assert (tier.counts.stored_blocks, tier.counts.loaded_blocks) == (1, 1)


def test_blocks_that_the_disk_does_not_have_are_counted_when_they_are_given_up() -> None:
    tier = OffloadTier(2, 2, lambda key: None)
    disk = tier.disk = MemoryDisk(ContentRunner(), random.Random(0), loses=1.0)
    keys = [BlockHash(bytes([i])) for i in range(4)]
    tier.offer(keys[0], "a", 0)
    tier.commit(tier.take_transfers())
    assert len(disk.writing) == 1
    disk.end_writes()
    disk.files[keys[1], "a"] = {}  # is given up before the one whose write has failed
    for i, num_unwritten in ((1, 0), (2, 0), (3, 1)):
        tier.offer(keys[i], "a", i)
        tier.commit(tier.take_transfers())
        assert tier.counts.unwritten_blocks == num_unwritten


@pytest.mark.parametrize(("num_slots", "stores_per_step"), [(3, 100), (100, 3)])
def test_a_step_copies_few_blocks_which_are_the_last_ones_offered(
    num_slots: int, stores_per_step: int
) -> None:
    """So the first blocks of a sequence, which are evicted after its others."""
    lost: list[BlockHash] = []
    tier = OffloadTier(num_slots, stores_per_step, lost.append)
    for plan in range(2):
        keys = [BlockHash(bytes([plan, i])) for i in range(10)]
        lost.clear()
        assert all(tier.offer(key, "a", i) for i, key in enumerate(keys))
        transfers = tier.take_transfers()
        assert [(item.key, item.block_id) for item in transfers if isinstance(item, Store)] == [
            (keys[i], i) for i in (7, 8, 9)
        ]
        assert len(transfers) == len({item.slot for item in transfers if isinstance(item, Store)})
        assert lost[-7:] == keys[:7]
        tier.commit(transfers)
        tier.check_integrity()
    assert tier.counts.stored_blocks == 6
    assert tier.num_blocks == min(num_slots, 6)


def test_a_copy_that_the_same_step_loads_is_made() -> None:
    tier = OffloadTier(2, 2, lambda key: None)
    keys = [BlockHash(bytes([i])) for i in range(6)]
    assert tier.offer(keys[0], "a", 0)
    assert tier.load(keys[0], "a", 9)
    for i in range(1, 6):
        assert tier.offer(keys[i], "a", i)
    first, load, *others = tier.take_transfers()
    assert isinstance(first, Store)
    assert first.key == keys[0]
    assert load == Load(first.slot, 9)
    assert [item.block_id for item in others] == [4, 5]
    tier.check_integrity()


def test_a_block_that_has_a_copy_is_held_until_the_copy_is_gone() -> None:
    """For prefix affinity: the worker has the prefix as long as it need not compute it."""
    manager = BlockManager(4, PREFIX_STEP, num_offload_blocks=4)
    joined = digests_of_prompt("default", range(2 * PREFIX_STEP))
    first = {joined[:DIGEST_BYTES]: True, joined[DIGEST_BYTES:]: True}
    manager.release(fill(manager, range(2 * PREFIX_STEP)))
    assert dict(manager.prefixes.drain()) == first
    manager.release(fill(manager, range(1000, 1000 + 4 * PREFIX_STEP)))
    assert False not in dict(manager.prefixes.drain()).values(), "it was moved, not lost"
    manager.release(fill(manager, range(2000, 2000 + 4 * PREFIX_STEP)))
    assert {d for d, is_held in manager.prefixes.drain() if not is_held} == set(first)
    assert manager.match(make_sequence(range(2 * PREFIX_STEP + 1))) == []


def test_the_victim_is_the_oldest_of_the_tenant_that_has_the_most_or_of_the_one_that_adds() -> None:
    rng = random.Random(1)
    lru: TenantLRU[int] = TenantLRU()
    model: dict[BlockHash, str] = {}  # in the order of use
    for step in range(3000):
        key = BlockHash(bytes([rng.randrange(60)]))
        action = rng.random()
        if key not in model and action < 0.6:
            model[key] = rng.choice("abcd")
            lru.add(key, model[key], step)
        elif key in model and action < 0.3:
            lru.touch(key)
            model[key] = model.pop(key)
        elif key in model and action < 0.5:
            tenant, _ = lru.remove(key)
            assert tenant == model.pop(key)
        assert len(lru) == len(model)
        if model:
            key, tenant = lru.next_victim(adding := rng.choice("abcde"))
            counts = {t: list(model.values()).count(t) for t in model.values()}
            assert counts[tenant] == max(counts.values())
            assert tenant == adding or counts.get(adding, 0) < counts[tenant]
            assert key == next(k for k, t in model.items() if t == tenant)
            assert lru.num_of(tenant) == counts[tenant]


def test_blocks_that_make_room_for_a_prompt_do_not_push_out_its_copies() -> None:
    runner = ContentRunner()
    engine = Engine(make_config(num_blocks=10, num_offload_blocks=18), runner)
    for name in "abca":
        engine.add(make_request(name, [ord(name)] * 33))
        stories = run_to_end(engine)
    assert stories["a"].outputs[-1].num_cached_tokens == 32


def test_copies_of_blocks_of_several_kv_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="single KV group"):
        make_config(num_offload_blocks=8, windows=(None, 8))
