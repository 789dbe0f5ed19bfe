"""What a worker measures of a job: where its time went, how far its output is from Redis."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from shared.messages import FinishReason, SamplingParams
from shared.transport.ports.queue import Delivery
from tests.unit.worker.fakes import make_job
from tests.unit.worker.runner_bench import Bench
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.request import EngineOutput, EngineRequest, RequestTimes
from worker.engines.echo import EchoModelRunner
from worker.runtime.messages import StepOutputs


def exposed(bench: Bench, name: str) -> float:
    text = bench.metrics.exposition.text().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


async def test_the_queue_time_of_a_job_is_its_wait_in_redis_and_in_the_engine() -> None:
    bench = Bench()
    bench.runner.admit(Delivery(make_job("0-a"), 1, waited_s=3.0))
    times = RequestTimes(queued_s=0.5, prefill_s=0.25, decode_s=2.0)
    output = EngineOutput("0-a/1/0", (65,), finish_reason=FinishReason.LENGTH, times=times)
    bench.runner.take(StepOutputs((output,)))
    assert exposed(bench, "penstock:request_queue_time_seconds_sum") == 3.5
    assert exposed(bench, "penstock:request_prefill_time_seconds_sum") == 0.25
    assert exposed(bench, "penstock:request_decode_time_seconds_sum") == 2.0
    assert exposed(bench, "penstock:request_success_total") == 0, "its end is not durable yet"
    await bench.log_of("0-a")
    assert exposed(bench, "penstock:request_success_total") == 1


async def test_the_backlog_is_as_old_as_its_oldest_token() -> None:
    bench = Bench()
    request_id = bench.admit(make_job("0-a"))
    assert bench.publisher.backlog_s == 0.0
    bench.says(request_id, b"a")
    await asyncio.sleep(0.05)
    bench.says(request_id, b"b")
    assert bench.publisher.backlog_s >= 0.05
    await bench.log_of("0-a")
    assert bench.publisher.backlog_s == 0.0


def test_the_engine_divides_the_time_of_a_sequence() -> None:
    """By its clock, which moves by a second with every look."""
    now_s = iter(range(1000))
    config = EngineConfig(num_blocks=64, max_num_seqs=1)
    engine = Engine(config, EchoModelRunner(100), clock=lambda: float(next(now_s)))
    for name in ("first", "second"):
        params = SamplingParams(max_tokens=3, temperature=0.0)
        engine.add(EngineRequest(request_id=name, prompt_token_ids=(1, 2, 3), params=params))
    first: dict[str, RequestTimes] = {}
    times: dict[str, RequestTimes] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.times is not None
                times[output.request_id] = output.times
            elif output.request_id not in first:
                assert output.times is not None
                first[output.request_id] = output.times
            else:
                assert output.times is None
    for name, (queued_s, prefill_s, _) in times.items():
        assert first[name] == (queued_s, prefill_s, 0.0), "what is known of its first token is so"
    assert times["second"].queued_s > times["first"].queued_s + times["first"].decode_s
    assert times["first"].decode_s == times["second"].decode_s > 0
    counts, total = engine.measures.sequences.counts
    assert (sum(counts), total) == (6, 6.0), "six steps of one sequence"
