"""Jobs of several choices in the worker: one prompt first, then the rest; each ends by itself."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest

from shared.choice_deltas import ChoiceDelta, chain_links, choice_deltas
from shared.messages import Cursor, ErrorCode, FinishReason, JobState, Segment
from shared.transport.ports.queue import Delivery
from shared.transport.wire import chain_hash
from tests.unit.worker.fakes import EOS, make_job
from tests.unit.worker.runner_bench import Bench
from worker.job_runner import choice_seed
from worker.running_jobs import request_id_of
from worker.runtime.messages import AddChoices, AddRequest, CancelRequest, RequestRejected

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def name(choice: int, attempt: int = 1) -> str:
    return request_id_of("0-a", attempt, choice)


async def output(bench: Bench) -> dict[int, ChoiceDelta]:
    """What is durable of each choice, once nothing waits any more."""
    await bench.log_of("0-a")
    parts: dict[int, list[ChoiceDelta]] = defaultdict(list)
    for step in bench.queue.appended:
        for item in step:
            for part in choice_deltas(item.delta):
                parts[part.choice].append(part)
    return {
        choice: ChoiceDelta(
            choice,
            tuple(token_id for part in those for token_id in part.token_ids),
            "".join(part.text for part in those),
            None,
            those[-1].finish_reason,
            those[-1].stop_reason,
        )
        for choice, those in parts.items()
    }


async def test_the_others_follow_when_the_first_ones_prompt_is_computed() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=3, seed=11, prompt=(1, 2)))
    (first,) = bench.sent
    assert isinstance(first, AddRequest)
    assert (first.request.request_id, first.request.params.seed) == (name(0), 11)
    bench.says(name(0), b"a", cached=5)
    (others,) = bench.sent[1:]
    assert isinstance(others, AddChoices)
    assert others.first.prompt_token_ids == (1, 2)
    assert [start.request_id for start in others.choices] == [name(1), name(2)]
    assert [start.seed for start in others.choices] == [choice_seed(11, 1), choice_seed(11, 2)]
    bench.says(name(0), b"b", cached=99)
    assert len(bench.sent) == 2


async def test_each_choice_ends_by_itself_and_the_last_one_ends_the_job() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=3, stop=("END",)))
    bench.says(name(0), b"h\xc3", cached=2)
    bench.says(name(1), b"x")
    bench.says(name(2), b"yEN")
    bench.says(name(1), [EOS], STOP, cached=77)
    bench.says(name(0), b"\xa9", LENGTH)
    assert bench.jobs.num_in_engine == 1
    bench.says(name(2), b"Dz")
    assert bench.sent[-1] == CancelRequest(name(2))
    assert bench.jobs.num_in_engine == 0
    bench.says(name(2), b"more")  # was on its way
    assert await output(bench) == {
        0: ChoiceDelta(0, tuple(b"h\xc3\xa9"), "hé", None, LENGTH, None),
        1: ChoiceDelta(1, (*b"x", EOS), "x", None, STOP, None),
        2: ChoiceDelta(2, tuple(b"yEND"), "y", None, STOP, "END"),
    }
    end = bench.queue.appended[-1][-1].end_of_job
    assert end is not None
    assert (end.state, end.reason, end.stop_reason) == (JobState.FINISHED, "length", None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 9)
    assert end.usage.cached_tokens == 2
    assert len(bench.jobs) == 0


async def test_a_job_that_none_of_its_choices_was_cut_in_ends_by_stop() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=2))
    bench.says(name(0), [EOS], STOP)
    bench.says(name(1), [EOS], STOP)
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert end.reason == "stop"


async def test_a_first_choice_that_ends_at_once_lets_the_others_go() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=2, max_tokens=1))
    bench.says(name(0), b"a", LENGTH)
    assert isinstance(bench.sent[-1], AddChoices)
    bench.says(name(1), b"b", LENGTH)
    assert {choice: part.text for choice, part in (await output(bench)).items()} == {0: "a", 1: "b"}


async def test_every_append_chains_over_tokens_and_choices() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=2))
    bench.says(name(0), b"ab")
    await bench.log_of("0-a")
    bench.says(name(1), b"a")
    bench.says(name(0), b"c", LENGTH)
    bench.says(name(1), b"", LENGTH)
    await bench.log_of("0-a")
    chain = ""
    for step in bench.queue.appended:
        for item in step:
            assert item.start_hash == chain
            chain = chain_hash(chain, chain_links(item.delta.token_ids, item.delta.segments))
            assert item.end_hash == chain


async def test_places_are_counted_by_choice() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=3))
    assert (bench.jobs.num_in_engine, bench.jobs.free_slots) == (3, 1)
    bench.says(name(0), b"a", LENGTH)
    assert bench.jobs.free_slots == 2
    bench.admit(make_job("0-b", num_choices=8))
    assert bench.jobs.free_slots == 0


async def test_a_fault_of_one_choice_ends_the_job_with_what_the_others_held_back() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=3, stop=("END",)))
    bench.says(name(0), b"aEN")
    bench.says(name(1), b"b", LENGTH)
    bench.says(name(2), (), FinishReason.ERROR, error=ErrorCode.NONFINITE_LOGITS)
    assert bench.sent[-1] == CancelRequest(name(0))
    parts = await output(bench)
    assert parts[0] == ChoiceDelta(0, tuple(b"aEN"), "aEN")
    assert (parts[1].text, parts[1].finish_reason) == ("b", LENGTH)
    end = bench.queue.appended[-1][-1].end_of_job
    assert end is not None
    assert (end.state, end.reason, end.usage.completion_tokens) == (
        JobState.FAILED,
        "nonfinite_logits",
        4,
    )


async def test_a_choice_that_the_engine_refuses_ends_the_job() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=2))
    bench.says(name(0), b"a")
    bench.runner.take(RequestRejected(name(1), ErrorCode.ENGINE_ERROR, "full"))
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert (end.state, end.message) == (JobState.FAILED, "full")
    assert bench.jobs.num_in_engine == 0


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_cancelled_job_takes_every_choice_out_of_the_engine(has_begun: bool) -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=3))
    if has_begun:
        bench.says(name(0), b"a")
    del bench.sent[:]
    bench.runner.cancel("0-a", None, "cancelled")
    result = [CancelRequest(name(choice)) for choice in (range(3) if has_begun else range(1))]
    assert bench.sent == result
    assert (bench.jobs.num_in_engine, len(bench.jobs)) == (0, 0)


async def test_a_dead_engines_job_is_handed_over_while_a_choice_of_it_runs() -> None:
    bench = Bench()
    bench.admit(make_job(num_choices=2))
    bench.says(name(0), b"a", LENGTH)
    assert [running.job.job_id for running in bench.runner.take_from_engine()] == ["0-a"]
    assert bench.jobs.num_in_engine == 0


LOGGED = Delivery(
    make_job(num_choices=4, seed=11, max_tokens=4),
    2,
    (*b"ab", *b"xyz", *b"c", EOS),
    (),
    Cursor(7, 6),
    cached_tokens=16,
    segments=(
        Segment(1, 2, 2),
        Segment(3, 3, 3),
        Segment(1, 1, 1),
        Segment(0, 1, 0, STOP),
    ),
)


async def test_a_resumed_job_takes_up_each_choice_where_its_log_ends() -> None:
    bench = Bench()
    bench.runner.admit(LOGGED)
    (first,) = bench.sent
    assert isinstance(first, AddRequest)
    assert (first.request.request_id, first.request.output_token_ids) == (name(1, 2), tuple(b"abc"))
    assert first.request.params.seed == choice_seed(11, 1)
    assert bench.jobs.num_in_engine == 3
    bench.says(name(1, 2), b"d", LENGTH, cached=48)
    others = bench.sent[-1]
    assert isinstance(others, AddChoices)
    assert [(start.request_id, start.output_token_ids) for start in others.choices] == [
        (name(2, 2), ()),
        (name(3, 2), tuple(b"xyz")),
    ]
    bench.says(name(2, 2), b"n", LENGTH)
    bench.says(name(3, 2), b"!", LENGTH)
    parts = await output(bench)
    assert {choice: part.text for choice, part in parts.items()} == {1: "d", 2: "n", 3: "!"}
    first_append = bench.queue.appended[0][0]
    links = chain_links(LOGGED.output_token_ids, LOGGED.segments)
    assert first_append.start_hash == chain_hash("", links)
    end = bench.queue.appended[-1][-1].end_of_job
    assert end is not None
    assert (end.usage.completion_tokens, end.usage.cached_tokens) == (10, 16)


async def test_a_log_in_which_every_choice_had_ended_gets_its_end() -> None:
    bench = Bench()
    segments = (Segment(0, 1, 1, LENGTH), Segment(1, 1, 1, STOP, 98))
    job = make_job(num_choices=2, max_tokens=1)
    bench.runner.admit(Delivery(job, 2, tuple(b"ab"), (), Cursor(2, 2), segments=segments))
    _, token_ids, end = await bench.log_of("0-a")
    assert token_ids == ()
    assert end is not None
    assert (end.reason, end.usage.completion_tokens) == ("length", 2)
    assert bench.sent == []


async def test_a_choice_that_ended_without_an_event_ends_with_the_next_token() -> None:
    bench = Bench()
    segments = (Segment(0, 1, 1), Segment(1, 1, 1))
    job = make_job(num_choices=2, stop_token_ids=(97,))
    bench.runner.admit(Delivery(job, 2, (97, 98), (), Cursor(2, 1), segments=_shown(segments)))
    (added,) = bench.sent
    assert isinstance(added, AddRequest)
    assert added.request.request_id == name(1, 2)
    bench.says(name(1, 2), b"c", LENGTH)
    await bench.log_of("0-a")
    (item,) = (item for step in bench.queue.appended for item in step)
    assert item.delta.segments == (Segment(0, 0, 0, STOP, 97), Segment(1, 1, 1, LENGTH))


def _shown(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """The stop token's text is not shown."""
    return (segments[0]._replace(num_bytes=0), *segments[1:])


async def test_a_log_of_another_tokenizer_fails_the_job() -> None:
    bench = Bench()
    wrong = (*LOGGED.segments[:3], Segment(0, 1, 1, STOP)) if LOGGED.segments else ()
    bad = dataclasses.replace(LOGGED, segments=(wrong[0]._replace(num_bytes=9), *wrong[1:]))
    bench.runner.admit(bad)
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert (end.state, end.reason) == (JobState.FAILED, "detokenizer_mismatch")


def test_the_seeds_of_choices_are_apart_and_always_the_same() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(None, 5) is None
    seeds = {choice_seed(seed, choice) for seed in (0, 1, -1, 2**63 - 1) for choice in range(128)}
    assert len(seeds) == 4 * 128
    assert all(seed is not None and -(2**63) <= seed < 2**63 for seed in seeds)
    # SplitMix64 begun at 1234567 says first, as its authors' code does:
    assert choice_seed(1234567, 1) == 6457827717110365317 - 2**63
