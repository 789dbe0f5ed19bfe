from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.messages import Cursor, ErrorCode, FinishReason, Job, JobState
from shared.transport.ports.queue import AppendResult, AppendStatus, Delivery
from tests.support.polling import until
from tests.unit.worker.fakes import EOS, VOCAB_SIZE, make_job
from tests.unit.worker.runner_bench import Bench
from worker.engine.running_slots import MAX_LANE_PREEMPTIONS
from worker.runtime.messages import (
    AddChoices,
    AddRequest,
    CancelRequest,
    RequestRejected,
    StepOutputs,
)


async def test_a_job_goes_to_the_engine_and_its_output_to_the_log() -> None:
    bench = Bench()
    request_id = bench.admit(make_job())
    assert isinstance(bench.sent[0], AddRequest)
    assert bench.sent[0].request.request_id == request_id
    bench.says(request_id, b"h", cached=2)
    bench.says(request_id, b"i")
    bench.says(request_id, [EOS], FinishReason.STOP)
    text, token_ids, end = await bench.log_of("0-a")
    assert (text, token_ids) == ("hi", (*b"hi", EOS))
    assert end is not None
    assert (end.state, end.reason, end.stop_reason) == (JobState.FINISHED, "stop", None)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (
        3,
        3,
        2,
    )
    assert len(bench.jobs) == 0
    assert bench.sent[1:] == []  # the engine knows of its own end


async def test_cached_tokens_that_come_with_the_end_are_counted() -> None:
    bench = Bench()
    request_id = bench.admit(make_job())
    bench.says(request_id, b"h")
    bench.says(request_id, [EOS], FinishReason.STOP, cached=2)
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert end.usage.cached_tokens == 2


async def test_a_stop_string_ends_the_job_and_frees_the_engine_at_once() -> None:
    bench = Bench()
    request_id = bench.admit(make_job(stop=("END",)))
    bench.says(request_id, b"aEN")
    bench.says(request_id, b"Dx")
    assert bench.sent[-1] == CancelRequest(request_id)
    assert bench.jobs.num_in_engine == 0
    bench.says(request_id, b"more")  # was on its way
    text, token_ids, end = await bench.log_of("0-a")
    assert (text, token_ids) == ("a", tuple(b"aEND"))
    assert end is not None
    assert (end.reason, end.stop_reason, end.usage.completion_tokens) == ("stop", "END", 4)


async def test_a_resumed_job_continues_its_log_and_keeps_the_first_prefix_hit() -> None:
    bench = Bench()
    request_id = bench.admit(make_job(stop=("END",)), attempt=2, logged="abc", cached=16)
    added = bench.sent[0]
    assert isinstance(added, AddRequest)
    assert added.request.output_token_ids == tuple(b"abc")
    bench.says(request_id, b"d", FinishReason.LENGTH, cached=48)
    text, _, end = await bench.log_of("0-a")
    assert text == "d"
    assert bench.queue.appended[0][0].delta.start == Cursor(3, 3)
    assert end is not None
    assert (end.usage.completion_tokens, end.usage.cached_tokens) == (4, 16)


async def test_a_log_whose_job_had_ended_gets_its_end_without_the_engine() -> None:
    bench = Bench()
    bench.runner.admit(Delivery(make_job(), 2, (65, EOS), (), Cursor(2, 1)))
    text, token_ids, end = await bench.log_of("0-a")
    assert (text, token_ids) == ("", ())
    assert end is not None
    assert (end.reason, end.usage.completion_tokens) == ("stop", 2)
    assert bench.sent == []


async def test_a_log_of_another_tokenizer_fails_the_job() -> None:
    bench = Bench()
    bench.runner.admit(Delivery(make_job(), 2, (65,), (), Cursor(1, 5)))
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert (end.state, end.reason) == (JobState.FAILED, "detokenizer_mismatch")


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (make_job(prompt=()), "payload_invalid"),
        (make_job(prompt=(VOCAB_SIZE,)), "payload_invalid"),
        (make_job(prompt=(-1,)), "payload_invalid"),
        (make_job(seed=None), "payload_invalid"),
        (make_job(logit_bias={VOCAB_SIZE: 1.0}), "payload_invalid"),
        (make_job(prompt=(1,) * 64), "context_length_exceeded"),
        (replace(make_job(prompt=(VOCAB_SIZE,)), prompt_digest="of another"), "model_replaced"),
    ],
)
async def test_a_job_that_the_model_cannot_run_fails_with_a_code(job: Job, code: str) -> None:
    bench = Bench()
    bench.admit(job)
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert (end.state, end.reason) == (JobState.FAILED, code)
    assert end.message
    assert bench.sent == []
    assert len(bench.jobs) == 0


async def test_a_job_that_the_engine_refuses_fails_with_its_code() -> None:
    bench = Bench()
    request_id = bench.admit(make_job())
    bench.runner.take(RequestRejected(request_id, ErrorCode.KV_CAPACITY_EXCEEDED, "too long"))
    _, _, end = await bench.log_of("0-a")
    assert end is not None
    assert (end.reason, end.message) == ("kv_capacity_exceeded", "too long")


async def test_an_error_of_the_engine_ends_the_job_with_the_text_that_was_held_back() -> None:
    bench = Bench()
    request_id = bench.admit(make_job(stop=("END",)))
    bench.says(request_id, b"aEN")
    bench.says(request_id, (), FinishReason.ERROR, error=ErrorCode.ENGINE_ERROR)
    text, token_ids, end = await bench.log_of("0-a")
    assert (text, token_ids) == ("aEN", tuple(b"aEN"))
    assert end is not None
    assert (end.state, end.reason) == (JobState.FAILED, "engine_error")


async def test_a_cancelled_job_leaves_the_engine_and_says_nothing_more() -> None:
    bench = Bench()
    request_id = bench.admit(make_job())
    bench.says(request_id, b"a")
    bench.runner.cancel("0-a", None, "cancelled")
    bench.runner.cancel("0-a", None, "cancelled")
    assert bench.sent[1:] == [CancelRequest(request_id)]
    bench.says(request_id, b"b")
    assert await bench.log_of("0-a") == ("", (), None)
    assert len(bench.jobs) == 0


async def test_a_message_about_an_older_attempt_does_not_drop_the_newer_one() -> None:
    bench = Bench()
    bench.admit(make_job(), attempt=2)
    bench.runner.cancel("0-a", 1, "dropped")
    assert len(bench.jobs) == 1
    bench.runner.cancel("0-a", 2, "dropped")
    assert len(bench.jobs) == 0


async def test_a_newer_claim_replaces_the_older_copy() -> None:
    bench = Bench()
    old = bench.admit(make_job())
    bench.says(old, b"a")
    new = bench.admit(make_job(), attempt=2)
    assert CancelRequest(old) in bench.sent
    bench.says(old, b"x")
    bench.says(new, b"b", FinishReason.LENGTH)
    text, _, end = await bench.log_of("0-a")
    assert text == "b"
    assert end is not None
    assert {item.attempt for step in bench.queue.appended for item in step} == {2}


async def test_an_older_claim_does_not_replace_the_newer_copy() -> None:
    bench = Bench()
    bench.admit(make_job(), attempt=2)
    bench.admit(make_job(), attempt=1)
    running = bench.jobs.get("0-a")
    assert running is not None
    assert running.attempt == 2


async def test_a_job_that_the_log_gave_away_leaves_the_engine() -> None:
    bench = Bench()
    request_id = bench.admit(make_job())
    bench.queue.answer = lambda item: AppendResult(AppendStatus.FENCED)
    bench.says(request_id, b"a")
    await bench.log_of("0-a")
    assert bench.sent[-1] == CancelRequest(request_id)
    assert len(bench.jobs) == 0


async def test_a_dead_engines_jobs_are_handed_over_and_ended_ones_are_still_written() -> None:
    bench = Bench()
    ended = bench.admit(make_job("0-a"))
    bench.admit(make_job("0-b"), attempt=3)
    bench.says(ended, b"a", FinishReason.LENGTH)
    handed = bench.runner.take_from_engine()
    assert [(running.job.job_id, running.attempt) for running in handed] == [("0-b", 3)]
    text, _, end = await bench.log_of("0-a")
    assert text == "a"
    assert end is not None
    assert bench.jobs.num_in_engine == 0


async def test_room_counts_what_is_in_the_engine_and_is_bounded_by_what_waits_for_the_store() -> (
    None
):
    bench = Bench()
    names = [bench.admit(make_job(f"0-{i}")) for i in range(4)]
    assert bench.jobs.free_slots == 0
    for name in names:
        bench.says(name, b"a", FinishReason.LENGTH)
    assert bench.jobs.free_slots == 4
    for i in range(4, 8):
        bench.says(bench.admit(make_job(f"0-{i}")), b"a", FinishReason.LENGTH)
    assert bench.jobs.free_slots == 0
    bench.publisher.drop("0-0")
    await bench.log_of("0-1")
    await until(lambda: bench.jobs.free_slots > 0)


def _admitted(bench: Bench) -> None:
    bench.admit(make_job())


def _generating(bench: Bench) -> None:
    bench.says(bench.admit(make_job()), b"h")


def _resumed(bench: Bench) -> None:
    bench.admit(make_job(), attempt=2, logged="abc")


def _choices_wait_for_the_prompt(bench: Bench) -> None:
    bench.admit(make_job(num_choices=3))


def _one_choice_has_ended(bench: Bench) -> None:
    bench.says(bench.admit(make_job(num_choices=3)), [EOS], FinishReason.STOP)


def _its_end_is_on_the_way(bench: Bench) -> None:
    bench.says(bench.admit(make_job()), [EOS], FinishReason.STOP)


def _refused(bench: Bench) -> None:
    bench.admit(make_job(prompt=()))


@pytest.mark.parametrize(
    "reach",
    [
        _admitted,
        _generating,
        _resumed,
        _choices_wait_for_the_prompt,
        _one_choice_has_ended,
        _its_end_is_on_the_way,
        _refused,
    ],
)
async def test_a_cancel_frees_everything_in_any_state(reach: Callable[[Bench], None]) -> None:
    bench = Bench()
    reach(bench)
    added = {
        message.request.request_id for message in bench.sent if isinstance(message, AddRequest)
    }
    for message in bench.sent:
        if isinstance(message, AddChoices):
            added |= {request.request_id for request in message.requests()}
    ended = {
        choice.request_id
        for running in bench.jobs
        for choice in running.choices
        if choice.was_sent and not choice.has_slot
    }
    bench.runner.cancel("0-a", None, "cancelled")
    assert (len(bench.jobs), bench.jobs.num_in_engine) == (0, 0)
    cancelled = [m.request_id for m in bench.sent if isinstance(m, CancelRequest)]
    assert sorted(cancelled) == sorted(added - ended)  # each that the engine runs, once
    for request_id in added:
        bench.says(request_id, b"late")
    await asyncio.wait_for(bench.publisher.flushed(), 1)
    assert bench.queue.appended == []
    bench.runner.cancel("0-a", None, "cancelled")  # again, by the next heartbeat
    assert [m.request_id for m in bench.sent if isinstance(m, CancelRequest)] == cancelled


async def test_a_preempted_job_is_given_back_when_it_waits_and_its_output_is_durable() -> None:
    bench = Bench()
    request_id = bench.admit(replace(make_job("0-a"), lane=7))
    bench.says(request_id, b"ab")
    bench.runner.take(StepOutputs((), gave_way=(request_id,)))
    assert bench.runner.take_preempted(0.0) == [], "its output is on the way"
    await bench.log_of("0-a")
    assert bench.runner.take_preempted(60.0) == []
    (given_back,) = bench.runner.take_preempted(0.0)
    assert given_back.num_lane_preemptions == 1
    assert bench.sent[-1] == CancelRequest(request_id)
    assert len(bench.jobs) == bench.jobs.num_in_engine == 0


async def test_a_preempted_job_that_runs_again_stays_and_counts_it_in_its_log() -> None:
    bench = Bench()
    request_id = bench.admit(replace(make_job("0-a"), lane=7))
    bench.says(request_id, b"a")
    await bench.log_of("0-a")
    bench.runner.take(StepOutputs((), gave_way=(request_id,)))
    bench.says(request_id, b"b")
    await bench.log_of("0-a")
    assert bench.runner.take_preempted(0.0) == []
    assert [item.num_lane_preemptions for step in bench.queue.appended for item in step] == [0, 1]


def test_a_job_that_gave_way_often_is_in_the_first_lane_at_its_next_worker() -> None:
    bench = Bench()
    job = replace(make_job("0-a"), lane=7)
    bench.runner.admit(Delivery(job, 2, num_lane_preemptions=MAX_LANE_PREEMPTIONS))
    (added,) = bench.sent
    assert isinstance(added, AddRequest)
    assert (added.request.priority, added.request.num_lane_preemptions) == (0, MAX_LANE_PREEMPTIONS)


async def test_a_job_of_an_adapter_names_it_to_the_engine() -> None:
    bench = Bench()
    bench.admit(make_job(model="ann", adapter="ann"))
    bench.admit(make_job("0-b"))
    added = [message.request.adapter for message in bench.sent if isinstance(message, AddRequest)]
    assert added == ["ann", ""]
    bench.runner.admit(Delivery(make_job("0-c", model="bob"), 1, (), (), Cursor(0, 0)))
    _, _, end = await bench.log_of("0-c")
    assert end is not None
    assert (end.reason, end.message) == ("payload_invalid", "this worker serves 'm', not 'bob'")
