"""A runner whose outputs a test scripts, and which records its calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from shared.messages import SamplingParams, TokenLogprob
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.ports import StepResult
from worker.engine.request import EngineOutput, EngineRequest

VOCAB_SIZE = 1000
EOS = 999


def counting(item: ScheduledSequence) -> int:
    """100, 101, 102, ...: names the output index, so that a lost or doubled token shows."""
    return 100 + item.output_index


@dataclass
class ScriptedHandle:
    runner: ScriptedRunner
    number: int
    result: StepResult
    structured: dict[int, ScheduledSequence]  # not sampled yet

    def sample_structured(self, seq_ids: Collection[int]) -> Mapping[int, Future[None]]:
        known = {i: len(s.output_token_ids) for i, s in self.structured.items() if i in seq_ids}
        self.runner.sampled.append(Structured(self.number, len(self.runner.steps), known))
        if self.number in self.runner.sample_errors:
            raise self.runner.sample_errors[self.number]
        waits = {i: f for i, f in self.runner.waits.items() if i in seq_ids and not f.done()}
        drawn = [seq_id for seq_id in seq_ids if seq_id not in waits]
        self.runner.say(self.result, [self.structured[seq_id] for seq_id in drawn])
        return waits

    def collect(self) -> StepResult:
        self.runner.collected.append(self.number)
        if self.number in self.runner.collect_errors:
            raise self.runner.collect_errors[self.number]
        return self.result


@dataclass(frozen=True)
class Structured:
    """A call of `sample_structured`."""

    step: int
    num_launched: int  # steps by then
    num_outputs: dict[int, int]  # that were known, by sequence


@dataclass
class Step:
    """One launch, copied: what the engine does later does not change it."""

    starts: dict[int, int]
    counts: dict[int, int]
    tables: dict[int, list[int]]
    order: list[int]
    num_decodes: int
    finished_seq_ids: tuple[int, ...]


@dataclass
class ScriptedRunner:
    next_token: Callable[[ScheduledSequence], int] = counting
    vocab_size: int = VOCAB_SIZE
    launch_errors: dict[int, Exception] = field(default_factory=dict)  # by number of the step
    collect_errors: dict[int, Exception] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)  # instead of the computed one
    failures: dict[int, dict[int, str]] = field(default_factory=dict)
    sample_errors: dict[int, Exception] = field(default_factory=dict)
    waits: dict[int, Future[None]] = field(default_factory=dict)  # of sequences whose mask is slow
    steps: list[Step] = field(default_factory=list)
    sampled: list[Structured] = field(default_factory=list)
    collected: list[int] = field(default_factory=list)
    device_s: Callable[[ScheduledBatch], float | None] = lambda batch: None
    # Asked before every launch; returns what that launch raises, or None.
    judge: Callable[[ScheduledBatch], Exception | None] = lambda batch: None

    def launch(self, batch: ScheduledBatch) -> ScriptedHandle:
        number = len(self.steps)
        items = batch.sequences
        self.steps.append(
            Step(
                starts={s.seq_id: s.start for s in items},
                counts={s.seq_id: s.num_scheduled_tokens for s in items},
                tables={s.seq_id: list(s.block_table) for s in items},
                order=[s.seq_id for s in items],
                num_decodes=batch.num_decodes,
                finished_seq_ids=batch.finished_seq_ids,
            )
        )
        if (error := self.judge(batch)) is not None:
            raise error
        if number in self.launch_errors:
            raise self.launch_errors[number]
        failed = self.failures.get(number, {})
        sampled = [s for s in items if s.samples]
        result = self.results.get(number)
        if result is None:
            result = StepResult({}, {}, failed, device_s=self.device_s(batch))
            self.say(result, [s for s in sampled if s.params.grammar is None])
        structured = {s.seq_id: s for s in sampled if s.params.grammar is not None}
        return ScriptedHandle(self, number, result, structured)

    def say(self, result: StepResult, items: Iterable[ScheduledSequence]) -> None:
        """Adds tokens to a result."""
        for item in items:
            if item.seq_id in result.failed:
                continue
            token = self.next_token(item)
            result.token_ids[item.seq_id] = token  # type: ignore[index]
            result.logprobs[item.seq_id] = TokenLogprob(token, -0.5)  # type: ignore[index]


def make_config(**changes: object) -> EngineConfig:
    values = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 200,
        "eos_token_ids": frozenset({EOS}),
        **changes,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


def make_engine(runner: ScriptedRunner | None = None, **changes: object) -> Engine:
    return Engine(make_config(**changes), runner or ScriptedRunner())


def make_request(
    request_id: str = "a",
    prompt: Iterable[int] = (1, 2, 3),
    *,
    outputs: Iterable[int] = (),
    tenant: str = "default",
    job_id: str = "",
    priority: int = 0,
    num_lane_preemptions: int = 0,
    **params: object,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(outputs),
        tenant=tenant,
        job_id=job_id,
        priority=priority,
        num_lane_preemptions=num_lane_preemptions,
        params=SamplingParams(**{"max_tokens": 4, "seed": 0, **params}),  # type: ignore[arg-type]
    )


@dataclass
class Story:
    """All outputs of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]


def run_to_end(
    engine: Engine, max_steps: int = 10_000, *, stories: dict[str, Story] | None = None
) -> dict[str, Story]:
    """Steps until nothing is left; checks the books after every step. Goes on with `stories`."""
    stories = {} if stories is None else stories
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return stories
        tell(stories, engine.step())
        engine.check_integrity()
    raise AssertionError(f"not done after {max_steps} steps")


def tell(stories: dict[str, Story], outputs: list[EngineOutput]) -> None:
    for output in outputs:
        story = stories.setdefault(output.request_id, Story())
        assert not story.outputs or story.last.finish_reason is None, "an output after the last"
        story.token_ids += output.token_ids
        story.outputs.append(output)
