"""HttpEngine in front of a stand-in for SGLang: see worker.engines.http.sglang_server.

No SGLang for a CPU is published. The stand-in has the routes and events of its source.
"""

from __future__ import annotations

import json

import pytest

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind, TokenLogprob
from tests.contract.worker.engines.http.conftest import PROMPT, Made, request, run, tokens
from tests.support.polling import wait_until
from tests.support.scripted_sglang import ScriptedSglang
from tests.support.scripted_upstream import continued

JSON_GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object"}))


@pytest.fixture
def upstream(made: Made) -> ScriptedSglang:
    upstream = made.upstream(ScriptedSglang)
    assert isinstance(upstream, ScriptedSglang)
    return upstream


@pytest.mark.parametrize("is_incremental", [False, True])
def test_each_token_comes_once_whether_events_repeat_earlier_ones(
    made: Made, upstream: ScriptedSglang, is_incremental: bool
) -> None:
    upstream.is_incremental, upstream.num_cached = is_incremental, 2
    engine = made.engine(upstream)
    (outputs,) = run(engine, [request(logprobs=2)]).values()
    expected = continued(PROMPT, 20)
    assert tokens(outputs) == expected
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].num_cached_tokens == 2
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    assert logprobs == [TokenLogprob(each, -0.5, ((each, -0.5), (7, -1.5))) for each in expected]


def test_a_broken_stream_continues_after_its_last_token(
    made: Made, upstream: ScriptedSglang
) -> None:
    engine = made.engine(upstream)
    upstream.faults.cut_after = 6
    (outputs,) = run(engine, [request()]).values()
    assert tokens(outputs) == continued(PROMPT, 20)
    assert upstream.bodies[2]["input_ids"][: len(PROMPT)] == PROMPT
    assert len(upstream.bodies[2]["input_ids"]) > len(PROMPT)
    assert outputs[-1].num_cached_tokens == 0


def test_an_output_that_a_stopped_server_aborts_continues(
    made: Made, upstream: ScriptedSglang
) -> None:
    engine = made.engine(upstream)
    upstream.faults.abort_after = 5
    (outputs,) = run(engine, [request()]).values()
    assert tokens(outputs) == continued(PROMPT, 20)


def test_a_cancelled_request_ends_at_the_server(made: Made, upstream: ScriptedSglang) -> None:
    engine = made.engine(upstream)
    upstream.faults.token_s = 0.01
    engine.add(request(max_tokens=400))
    wait_until(lambda: engine.step() and upstream._num_running == 1, "tokens")
    engine.cancel("a")
    wait_until(lambda: upstream._num_running == 0, "the end of the stream")


def test_a_grammar_that_sglang_cannot_compile_is_refused_with_its_reason(
    made: Made, upstream: ScriptedSglang
) -> None:
    engine = made.engine(upstream)
    upstream.refusal = "Failed to compile json grammar"
    (outputs,) = run(engine, [request(grammar=JSON_GRAMMAR)]).values()
    assert outputs[-1].error is ErrorCode.PAYLOAD_INVALID
    assert "Failed to compile json grammar" in outputs[-1].message
    assert upstream.bodies[-1]["sampling_params"]["json_schema"] == JSON_GRAMMAR.text
    assert len(upstream.bodies) == 1


def test_an_unhealthy_server_is_waited_for_and_its_version_is_told(
    made: Made, upstream: ScriptedSglang
) -> None:
    engine = made.engine(upstream, made.upstream())
    upstream.faults.is_healthy, upstream.faults.cut_after = False, 2
    run(engine, [request("a"), request("b")])
    assert "answers 503" in engine._upstreams.failures
