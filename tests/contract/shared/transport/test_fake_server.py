"""The in-process server (`fake://`) serves too: one case of each room of the contract.

That it runs the scripts as servers do is shown by test_differential_walk, which compares every
transition, and its own pull, which polls, by what is pulled here.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.redis.connections import forget_fake_server
from shared.transport.connect import RedisTransport, open_transport
from tests.contract.shared.transport import (
    test_append,
    test_batches,
    test_bus,
    test_choices,
    test_dead_letters,
    test_endings,
    test_files,
    test_idempotency,
    test_key_bounds,
    test_lanes,
    test_queue_timeouts,
    test_reads,
    test_recovery,
    test_restore,
    test_submit_and_pull,
)
from tests.support.transport_steps import Steps

Case = Callable[..., Awaitable[None]]
CASES: tuple[Case, ...] = (
    test_append.test_the_last_delta_and_the_end_are_one_step,
    test_batches.test_a_lease_that_ended_is_taken_over_with_the_progress,
    test_bus.test_what_follows_the_confirmation_is_heard_in_order,
    test_choices.test_a_recovered_job_knows_where_each_choice_was,
    test_dead_letters.test_a_letter_is_run_again_as_a_job_without_a_history,
    test_endings.test_a_running_job_is_cancelled_at_once_and_its_worker_notified,
    test_files.test_the_input_of_an_open_batch_stays,
    test_idempotency.test_of_many_submits_at_once_one_makes_the_job,
    test_key_bounds.test_no_key_lives_for_ever_but_the_documented_ones,
    test_lanes.test_every_eighth_job_taken_is_the_oldest_that_waits,
    test_queue_timeouts.test_reap_ends_once_what_no_worker_began_in_time,
    test_reads.test_a_log_is_read_in_pages_strictly_after_the_cursor,
    test_recovery.test_a_dead_workers_job_goes_on_where_its_log_ends,
    test_submit_and_pull.test_pull_waits_for_the_first_job_and_no_longer,
    test_restore.test_a_lost_job_is_put_back_whole_and_ends,
    test_submit_and_pull.test_a_submitted_job_is_delivered_whole_with_attempt_one,
)


@pytest.fixture
async def fake() -> AsyncIterator[RedisTransport]:
    url = f"fake://{uuid.uuid4().hex}"
    opened = await open_transport(url, namespace="test")
    yield opened
    await opened.aclose()
    forget_fake_server(url)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("test_"))
async def test_the_in_process_server_passes(case: Case, fake: RedisTransport) -> None:
    given = {"transport": fake, "steps": Steps(fake)}
    await case(**{name: given[name] for name in inspect.signature(case).parameters})
