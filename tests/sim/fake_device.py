"""A device that cannot be fooled: every KV entry knows the whole prefix that it was computed after.

It executes steps at launch, in launch order, as one compute stream does, and hands the results out
at collect. Sequences with a grammar are sampled by `sample_structured` alone, with or without
lookahead, which has to come when all their tokens are known. Its model draws the next token from
everything before it, so that one wrong, stale or foreign KV entry is seen at once. Each KV group
has entries of its own; with a window it reads the last ones only, each of which still knows its
whole prefix. Copies of blocks in host memory know it too. What it finds wrong is a DeviceViolation,
which no engine catches.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from shared.messages import ErrorCode, PromptLogprob, SamplingParams, TokenLogprob
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.errors import DeviceLost, OutOfMemory
from worker.engine.offload import Store, Transfers
from worker.engine.ports import StepResult

EOS = 0
Block = list[tuple[int, int] | None]  # token, and a hash of its whole prefix


class DeviceViolation(BaseException):
    """The engine broke a promise of its port. Not an Exception: the engine must not contain it."""


class InjectedFault(Exception):
    """A step that fails because the workload says so. What it wrote and sampled is worthless."""


def require(holds: bool, what: str, *facts: object) -> None:
    if not holds:
        raise DeviceViolation(f"{what}: {facts}")


def next_token(context: Sequence[int], params: SamplingParams, num_outputs: int, vocab: int) -> int:
    """The fake model: a function of the full context, never a stop before min_tokens.

    With a grammar it may stop at any time, as if there were no other token left.
    """
    token = (hash(tuple(context)) >> 7) % vocab
    if num_outputs < params.min_tokens and params.grammar is None:
        banned = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        while token in banned:
            token = (token + 1) % vocab
    return token


@dataclass(frozen=True)
class FaultRates:
    """Chances per step."""

    launch: float = 0.0
    collect: float = 0.0
    sample: float = 0.0  # of the structured sequences, where there are some
    memory: float = 0.0  # of a limit that holds for the next steps
    lost: float = 0.0  # of the device, for ever
    sequence: float = 0.0
    unready: float = 0.0  # of each structured sequence, whose mask is not there: no fault


class NextTime(Future[None]):
    """Is not done when it is first asked, and is from then on."""

    def done(self) -> bool:
        was_done = super().done()
        if not was_done:
            self.set_result(None)
        return was_done


@dataclass
class Handle:
    sampled: Sampled
    scores: dict[int, tuple[PromptLogprob, ...]]
    order: int
    device: FakeDevice
    fault: str  # the way of failing, with the place in brackets
    tables: list[tuple[ScheduledSequence, list[int]]]
    before: Memory
    waiting: dict[int, ScheduledSequence]  # not sampled yet
    transfers: Transfers
    is_void: bool = False  # it was launched behind a step that failed

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        device, waiting = self.device, self.waiting
        require(not self.is_void, "sampled behind a step that failed", self.order)
        require(bool(waiting), "nothing to sample, or sampled twice", self.order)
        require(device.next_collect == self.order, "before the step before was collected")
        require(set(seq_ids) <= waiting.keys(), "sampled what has no grammar", seq_ids)
        if self.fault.endswith("(sample)"):
            self._end()
            self._fail()
        self.waiting = {}
        unready = {
            i: NextTime()
            for i in seq_ids
            if i not in device.doomed and device.rng.random() < device.rates.unready
        }
        for seq_id, item in waiting.items():
            if seq_id in unready:
                continue
            if seq_id in seq_ids:
                device.sample(item, self.sampled)
            else:
                device.ended.add(seq_id)
                self.sampled.token_ids[seq_id] = device.vocab_size - 1
        return unready

    def collect(self) -> StepResult:
        require(self.device.next_collect == self.order, "collected out of order", self.order)
        require(self.is_void or not self.waiting, "collected before it was sampled", self.order)
        for item, table in self.tables:
            require(list(item.block_table[: len(table)]) == table, "table changed under a batch")
        self._end()
        if self.fault.endswith("(collect)"):
            self._fail()
        sampled = self.sampled
        return StepResult(sampled.token_ids, sampled.logprobs, sampled.failed, self.scores)

    def _end(self) -> None:
        self.device.next_collect += 1
        self.device.outstanding.remove(self)

    def _fail(self) -> None:
        if not self.is_void:
            # What was launched behind it rests on it.
            for handle in reversed([self, *self.device.outstanding]):
                handle.is_void = True
                handle.before.restore(self.device)
                for item, _ in handle.tables:
                    self.device.spoil(item)
                self.device.spoil_copies(handle.transfers)
        if self.fault.startswith("lost"):
            raise DeviceLost(self.fault)
        raise OutOfMemory(self.fault) if self.fault.startswith("memory") else InjectedFault()


@dataclass
class Sampled:
    """A step's tokens so far."""

    fails: bool  # whether a sequence that is doomed is reported, or gets a token all the same
    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass
class Memory:
    """What the device knew of a step's sequences before it."""

    truth: dict[int, list[int] | None]
    last: dict[int, int | None]
    reached: dict[int, int | None]
    doomed: set[int]

    @classmethod
    def of(cls, device: FakeDevice, batch: ScheduledBatch) -> Memory:
        seq_ids = [item.seq_id for item in batch.sequences]
        truths = {i: device.truth.get(i) for i in seq_ids}
        return cls(
            {i: None if truth is None else list(truth) for i, truth in truths.items()},
            {i: device.last.get(i) for i in seq_ids},
            {i: device.reached.get(i) for i in seq_ids},
            device.doomed.copy(),
        )

    def restore(self, device: FakeDevice) -> None:
        device.doomed = self.doomed
        for was, now in (
            (self.truth, device.truth),
            (self.last, device.last),
            (self.reached, device.reached),
        ):
            for seq_id, value in was.items():  # type: ignore[attr-defined]
                if value is None:
                    now.pop(seq_id, None)  # type: ignore[attr-defined]
                else:
                    now[seq_id] = value  # type: ignore[index]


@dataclass
class FakeDevice:
    config: EngineConfig
    vocab_size: int
    rng: random.Random
    rates: FaultRates = FaultRates()
    next_launch: int = 0
    next_collect: int = 0
    num_faults: int = 0
    num_sampling_faults: int = 0

    def __post_init__(self) -> None:
        blocks, size = self.config.num_blocks, self.config.block_size
        self.kv: list[Block] = [[None] * size for _ in range(blocks)]
        self.slots: list[Block] = [[None] * size for _ in range(self.config.num_offload_blocks)]
        self.last: dict[int, int] = {}  # newest sampled token by sequence
        self.truth: dict[int, list[int]] = {}
        self.reached: dict[int, int] = {}  # the end of a sequence's last step
        self.gone: set[int] = set()
        self.ended: set[int] = set()  # by what the engine said when it sampled
        self.prompts: dict[int, tuple[tuple[int, ...], str]] = {}  # by id(): prompt and tenant
        self.doomed: set[int] = set()  # failed by themselves: their KV is garbage
        self.outstanding: list[Handle] = []
        self.is_lost = False
        self.most_tokens = self.config.max_num_batched_tokens  # that fit the memory now
        self.num_tight_steps = 0  # until everything fits again

    def introduce(self, prompt: tuple[int, ...], tenant: str) -> tuple[int, ...]:
        """The prompt as a tuple of its own, by whose identity the device knows the tenant."""
        own = (*prompt,)
        assert own is not prompt
        self.prompts[id(own)] = own, tenant  # kept alive, so that the id stays its own
        return own

    def launch(self, batch: ScheduledBatch) -> Handle:
        self._check_shape(batch)
        for seq_id in batch.finished_seq_ids:
            self.gone.add(seq_id)
            self.last.pop(seq_id, None)
        require(not any(h.waiting for h in self.outstanding), "the step before is not sampled")
        before = Memory.of(self, batch)
        waiting = {s.seq_id: s for s in batch.sequences if s.samples and s.params.grammar}
        fault = self._draw_fault(batch, bool(waiting))
        self._copy(batch.transfers)
        for item in batch.sequences:
            self._write(item)
        if fault.endswith("(launch)"):
            for item in batch.sequences:
                self.spoil(item)
            self.spoil_copies(batch.transfers)
            if fault.startswith("lost"):
                raise DeviceLost(fault)
            raise OutOfMemory(fault) if fault.startswith("memory") else InjectedFault(fault)
        sampled = Sampled(fault == "sequence")
        for item in batch.sequences:
            if item.seq_id not in self.doomed:
                self._read(item)
            if item.seq_id not in waiting:
                self.sample(item, sampled)
        handle = Handle(
            sampled,
            {item.seq_id: self._scores(item) for item in batch.sequences},
            self.next_launch,
            self,
            fault,
            [(item, list(item.block_table)) for item in batch.sequences],
            before,
            waiting,
            batch.transfers,
        )
        self.next_launch += 1
        self.outstanding.append(handle)
        return handle

    def _scores(self, item: ScheduledSequence) -> tuple[PromptLogprob, ...]:
        """Of tokens whose predecessors this very step computes: no cache has their logits."""
        for position in item.scores:
            require(item.start < position <= item.end, "a score of another step", item, position)
        return tuple(PromptLogprob(item.prompt_token_ids[p], 0.0, 1) for p in item.scores)

    def _check_shape(self, batch: ScheduledBatch) -> None:
        config = self.config
        items = batch.sequences
        require(bool(items or batch.transfers), "empty batch")
        require(batch.num_tokens <= config.max_num_batched_tokens, "over the token budget")
        require(len(items) <= config.max_num_seqs, "over the seats")
        require(len({item.seq_id for item in items}) == len(items), "a sequence twice in a batch")
        decodes = [item.num_scheduled_tokens == 1 and item.samples for item in items]
        if not batch.transfers:  # else a chunk may be the one token that was not loaded
            require(decodes == sorted(decodes, reverse=True), "a chunk before a decode")
            require(batch.num_decodes == sum(decodes), "num_decodes")
        for item in items:
            require(item.seq_id not in self.gone, "launched after it was announced as gone")
            require(item.seq_id not in self.ended, "launched after it had ended", item)
            require(item.seq_id not in batch.finished_seq_ids, "scheduled and gone at once")
            require(item.num_scheduled_tokens > 0, "nothing to compute", item)
            rows, rest = divmod(len(item.block_table), len(config.windows))
            require(not rest and rows * config.block_size >= item.end, "table too short", item)
            missing = item.num_scheduled_tokens - len(item.token_ids)
            require(missing in (0, config.lookahead), "unknown tokens", item)
            require(not missing or item.samples, "an unknown token that samples nothing", item)

    def _draw_fault(self, batch: ScheduledBatch, is_structured: bool) -> str:
        rates, rng = self.rates, self.rng
        places = ["(launch)", "(collect)", *(["(sample)"] if is_structured else [])]
        if self.is_lost:
            return "lost" + rng.choice(places)
        self.num_tight_steps -= 1
        if self.num_tight_steps == 0:
            self.most_tokens = self.config.max_num_batched_tokens
        if rng.random() < rates.memory:
            self.most_tokens, self.num_tight_steps = rng.randint(1, 8), rng.randint(1, 200)
        fault = ""
        if batch.num_tokens > self.most_tokens:
            fault = "memory" + rng.choice(places)
        elif rng.random() < rates.lost:
            self.is_lost = True
            fault = "lost" + rng.choice(places)
        elif rng.random() < rates.launch:
            fault = "(launch)"
        elif rng.random() < rates.collect:
            fault = "(collect)"
        elif is_structured and rng.random() < rates.sample:
            fault = "(sample)"
        elif rng.random() < rates.sequence:
            self.doomed.add(rng.choice(batch.sequences).seq_id)
            fault = "sequence"
        self.num_faults += bool(fault)
        self.num_sampling_faults += fault.endswith("(sample)")
        return fault

    def spoil(self, item: ScheduledSequence) -> None:
        """Nothing that a failed step wrote may ever be read."""
        for group in range(len(self.config.windows)):
            for position in range(item.start, item.end):
                block, place = self._place(item, position, group)
                block[place] = None

    def _copy(self, transfers: Transfers) -> None:
        for item in transfers:
            if isinstance(item, Store):
                self.slots[item.slot] = self.kv[item.block_id].copy()
            else:
                assert isinstance(item.source, int), "there is no disk"
                self.kv[item.block_id] = self.slots[item.source].copy()

    def spoil_copies(self, transfers: Transfers) -> None:
        """Nor may what it copied."""
        for item in transfers:
            block = self.slots[item.slot] if isinstance(item, Store) else self.kv[item.block_id]
            block[:] = [None] * self.config.block_size

    def _place(self, item: ScheduledSequence, position: int, group: int) -> tuple[list, int]:
        row, place = divmod(position, self.config.block_size)
        return self.kv[item.block_table[row * len(self.config.windows) + group]], place

    def _root(self, item: ScheduledSequence, group: int) -> int:
        _, tenant = self.prompts.get(id(item.prompt_token_ids), ((), "self-test"))
        return hash((group, *tenant.encode()))

    def _write(self, item: ScheduledSequence) -> None:
        tokens = list(item.token_ids)
        if len(tokens) < item.num_scheduled_tokens:
            doomed = item.seq_id in self.doomed
            require(doomed or item.seq_id in self.last, "an unknown token", item.seq_id)
            tokens.append(self.last.get(item.seq_id, 1))
        for group in range(len(self.config.windows)):
            self._write_group(item, tokens, group)

    def _write_group(self, item: ScheduledSequence, tokens: list[int], group: int) -> None:
        for position, token in zip(range(item.start, item.end), tokens, strict=True):
            block, place = self._place(item, position, group)
            if item.seq_id in self.doomed:
                block[place] = None
                continue
            before = self._root(item, group)
            if position:
                previous_block, previous_place = self._place(item, position - 1, group)
                previous = previous_block[previous_place]
                require(previous is not None, "wrote after garbage", item.seq_id, position)
                assert previous is not None
                before = previous[1]
            block[place] = (token, hash((before, position, token)))

    def sample(self, item: ScheduledSequence, sampled: Sampled) -> None:
        """Adds the sequence's next token, if one is wanted."""
        seq_id = item.seq_id
        if seq_id in self.doomed:
            if sampled.fails:
                sampled.failed[seq_id] = self.rng.choice([ErrorCode.NONFINITE_LOGITS, "no such"])
                return
            token = 1
        elif item.samples:
            token = self._next_token(item)
        if item.samples:
            sampled.token_ids[seq_id] = self.last[seq_id] = token
            sampled.logprobs[seq_id] = TokenLogprob(token, 0.0)

    def _next_token(self, item: ScheduledSequence) -> int:
        """Extends what is true of a sequence, whose context is as it should be."""
        truth = self.truth[item.seq_id]
        require(item.end == len(truth), "sampled one place twice", item.seq_id)
        if item.params.grammar is not None:
            known = [*item.prompt_token_ids, *item.output_token_ids]
            require(known == truth, "a grammar with a token in flight", item.seq_id)
        token = next_token(truth, item.params, item.output_index, self.vocab_size)
        truth.append(token)
        return token

    def _read(self, item: ScheduledSequence) -> None:
        """Reads the context back, as far as the step's queries reach."""
        known = [*item.prompt_token_ids, *item.output_token_ids]
        truth = self.truth.setdefault(item.seq_id, known)
        for group, window in enumerate(self.config.windows):
            first = 0 if window is None else max(0, item.start - window + 1)
            context = self._read_group(item, truth, group, first)
            require(context == truth[: len(context)], "KV of other tokens", item.seq_id, truth)
        if item.start < self.reached.get(item.seq_id, 0):
            require(known == truth, "started over with a token in flight", item.seq_id)
        self.reached[item.seq_id] = item.end

    def _read_group(
        self, item: ScheduledSequence, truth: list[int], group: int, first: int
    ) -> list[int]:
        """Returns the tokens of a group's entries from the `first` on, after the true ones."""
        context = truth[:first]
        chain = self._root(item, group)
        for position, token in enumerate(context):
            chain = hash((chain, position, token))
        for position in range(first, item.end):
            block, place = self._place(item, position, group)
            entry = block[place]
            require(entry is not None, "read garbage", item.seq_id, position)
            assert entry is not None
            chain = hash((chain, position, entry[0]))
            require(entry[1] == chain, "KV of another prefix", item.seq_id, position)
            context.append(entry[0])
        return context
