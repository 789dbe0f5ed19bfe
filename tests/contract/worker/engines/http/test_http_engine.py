"""HttpEngine over real sockets: streams that break, servers that refuse, end and come back."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind
from shared.text.checkpoint_text import load_tokenizer_and_eos
from tests.contract.worker.engines.http.conftest import PROMPT, Made, request, run, tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.launched import free_port
from tests.support.polling import wait_until
from tests.support.scripted_upstream import ScriptedUpstream, continued
from worker.engine.errors import RequestRefused, UpstreamsLost
from worker.engine.request import EngineOutput, EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.http import engine as engine_module
from worker.engines.http.build import build_http_engine
from worker.engines.http.engine import HttpEngine
from worker.engines.http.options import UpstreamAddress, parse_upstreams
from worker.engines.http.upstreams import PROBE_INTERVAL_S
from worker.model.errors import ModelError


def test_the_tokens_of_the_upstream_come_in_order_and_end_at_the_limit(made: Made) -> None:
    engine = made.engine(made.upstream())
    prompts = {f"r{number}": [20 + number, 21] for number in range(5)}
    outputs = run(engine, (request(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == continued(prompt, 20)
        assert outputs[name][-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().generated_tokens == 100


def test_a_stop_token_ends_the_output_as_in_the_own_engine(made: Made) -> None:
    expected = continued(PROMPT, 20)
    (outputs,) = run(
        made.engine(made.upstream()), [request(stop_token_ids=(expected[6],))]
    ).values()
    stop_at = expected.index(expected[6])
    assert tokens(outputs) == expected[: stop_at + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == expected[6]


def test_a_broken_stream_continues_after_its_last_token(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.cut_after = 3
    (outputs,) = run(engine, [request()]).values()
    assert tokens(outputs) == continued(PROMPT, 20)
    assert upstream.faults.num_cut == 6
    second = upstream.bodies[1]
    assert second["prompt"] == [*PROMPT, *continued(PROMPT, 3)]
    assert second["max_tokens"] == 17


def test_a_resumed_request_sends_its_earlier_tokens(made: Made) -> None:
    upstream = made.upstream()
    whole = continued(PROMPT, 20)
    engine = made.engine(upstream)
    resumed = EngineRequest(
        request_id="a",
        prompt_token_ids=tuple(PROMPT),
        params=request().params,
        output_token_ids=tuple(whole[:8]),
    )
    (outputs,) = run(engine, [resumed]).values()
    assert tokens(outputs) == whole[8:]


def test_another_upstream_continues_what_an_ended_one_had(made: Made) -> None:
    first, second = made.upstream(), made.upstream()
    engine = made.engine(first, second)
    first.faults.is_stuck = second.faults.is_stuck = True
    names = [f"r{number}" for number in range(6)]
    for name in names:
        engine.add(request(name))
    while len(first.bodies) + len(second.bodies) < len(names):
        engine.step()
    assert len(first.bodies) == len(second.bodies) == 3
    second.faults.is_stuck = False
    first.__exit__()
    outputs = run(engine, [])
    assert len(outputs) >= 3
    assert all(tokens(each) == continued(PROMPT, 20) for each in outputs.values())


def test_requests_are_divided_by_weight(made: Made) -> None:
    heavy, light = made.upstream(), made.upstream()
    heavy.faults.is_stuck = light.faults.is_stuck = True
    engine = made.engine(urls=f"{heavy.url} weight=3, {light.url}")
    for number in range(8):
        engine.add(request(f"r{number}"))
    while len(heavy.bodies) + len(light.bodies) < 8:
        engine.step()
    assert (len(heavy.bodies), len(light.bodies)) == (6, 2)


def test_a_refused_request_fails_alone_with_the_upstreams_reason(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.status = 400
    (outputs,) = run(engine, [request()]).values()
    assert outputs[-1].error is ErrorCode.PAYLOAD_INVALID
    assert "as told" in outputs[-1].message
    upstream.faults.status = 200
    (outputs,) = run(engine, [request()]).values()
    assert tokens(outputs) == continued(PROMPT, 20)


def test_a_busy_upstream_is_asked_again(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.status = 503
    engine.add(request())
    while len(upstream.bodies) < 3:
        assert engine.step() == []
    upstream.faults.status = 200
    (outputs,) = run(engine, []).values()
    assert tokens(outputs) == continued(PROMPT, 20)


def test_a_request_that_always_breaks_before_a_token_fails(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.cut_after = 0
    (outputs,) = run(engine, [request()]).values()
    assert outputs[-1].error is ErrorCode.ENGINE_ERROR
    assert upstream.faults.num_cut == engine_module.MAX_VAIN_BREAKS


def test_a_cancelled_request_has_no_further_outputs(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.is_stuck = True
    engine.add(request())
    while not upstream.bodies:
        engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.has_unfinished()
    upstream.faults.is_stuck = False
    outputs = run(engine, [request("b")])
    assert outputs.keys() == {"b"}


def test_no_more_requests_are_sent_than_there_are_slots(made: Made) -> None:
    upstream = made.upstream()
    upstream.faults.is_stuck = True
    engine = made.engine(upstream)
    num_slots = engine.config.max_num_seqs
    for number in range(num_slots + 3):
        engine.add(request(f"r{number}"))
    for _ in range(20):
        engine.step()
    assert len(upstream.bodies) == engine.stats().running == num_slots
    assert engine.stats().waiting == 3


def test_an_outage_of_all_upstreams_ends_the_engine(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_OUTAGE_S", 0.3)
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.__exit__()
    engine.add(request())
    with pytest.raises(UpstreamsLost, match=rf"no upstream answers: {upstream.url}"):
        run(engine, [])


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_log_probabilities_of_a_prompt_are_refused(made: Made, max_tokens: int) -> None:
    with pytest.raises(RequestRefused, match="log probabilities of a prompt") as refused:
        made.engine(made.upstream()).add(request(prompt_logprobs=0, max_tokens=max_tokens))
    assert refused.value.code is ErrorCode.PAYLOAD_INVALID


def test_an_output_that_a_stopped_server_aborts_continues(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.abort_after = 5
    (outputs,) = run(engine, [request()]).values()
    assert tokens(outputs) == continued(PROMPT, 20)
    assert upstream.bodies[1]["prompt"] == [*PROMPT, *continued(PROMPT, 5)]


def run_with_poison(
    engine: HttpEngine, upstream: ScriptedUpstream, max_tokens: int, most_ends: int | None = None
) -> tuple[dict[str, list[EngineOutput]], list[int]]:
    """Returns the outputs of a request that ends the upstream, at most `most_ends` times, and of
    those that run beside it; and how many ran at each step after the last end."""
    prompts = {f"r{number}": PROMPT for number in range(6)} | {"poison": [29, 30]}
    upstream.faults.poison, upstream.faults.token_s = 29, 0.02
    found: dict[str, list[EngineOutput]] = {name: [] for name in prompts}
    running = []

    def step() -> None:
        if len(upstream.num_beside) == most_ends:
            upstream.faults.poison = None
            running.append(upstream._num_running)
        for output in engine.step():
            found[output.request_id].append(output)

    for name, prompt in prompts.items():
        if name == "poison":
            wait_until(lambda: step() or min(map(len, [*found.values()][:-1])) > 0, "tokens")
        engine.add(request(name, prompt, max_tokens=max_tokens))
    while engine.has_unfinished():
        step()
    for name, prompt in prompts.items():
        if found[name][-1].error is None:
            assert tokens(found[name]) == continued(prompt, max_tokens)
    return found, running


def test_a_request_that_ends_the_upstream_each_time_fails_and_none_beside_it(made: Made) -> None:
    upstream = made.upstream()
    found, _ = run_with_poison(made.engine(upstream), upstream, max_tokens=40)
    failed = {name for name, outputs in found.items() if outputs[-1].error is not None}
    assert failed == {"poison"}
    assert found["poison"][-1].error is ErrorCode.ENGINE_ERROR
    assert "with this request alone in it" in found["poison"][-1].message
    assert upstream.num_beside[0] > 0
    assert upstream.num_beside[-engine_module.MAX_VAIN_BREAKS :] == [0, 0, 0]
    assert len(upstream.num_beside) <= 2 * engine_module.MAX_VAIN_BREAKS


def test_requests_that_ran_alone_share_the_upstream_again(made: Made) -> None:
    upstream = made.upstream()
    most_ends = engine_module.MAX_SHARED_BREAKS
    found, running = run_with_poison(made.engine(upstream), upstream, 120, most_ends)
    assert all(outputs[-1].error is None for outputs in found.values())
    assert max(running[running.index(1) :]) > 1


def test_a_stream_that_always_breaks_ends(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_BREAKS", 4)
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.cut_after = 2
    (outputs,) = run(engine, [request(max_tokens=100)]).values()
    assert outputs[-1].error is ErrorCode.ENGINE_ERROR
    assert tokens(outputs) == continued(PROMPT, 8)


def test_an_upstream_whose_engine_ended_gets_no_requests(made: Made) -> None:
    ended, well = made.upstream(), made.upstream()
    engine = made.engine(ended, well)
    ended.faults.is_healthy, ended.faults.cut_after = False, 3
    run(engine, [request("a"), request("b")])
    num_before = len(ended.bodies)
    found = run(engine, [request(f"r{number}") for number in range(6)])
    assert all(tokens(outputs) == continued(PROMPT, 20) for outputs in found.values())
    assert len(ended.bodies) == num_before
    ended.faults.is_healthy, ended.faults.cut_after = True, None
    wait_until(lambda: engine._upstreams._all[0].is_up, "the probe")
    run(engine, [request("c"), request("d")])
    assert len(ended.bodies) > num_before


def test_cached_tokens_are_the_upstreams(made: Made) -> None:
    upstream = made.upstream()
    upstream.num_cached = 2
    engine = made.engine(upstream)
    (outputs,) = run(engine, [request()]).values()
    assert outputs[-1].num_cached_tokens == 2
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (3, 2)
    # Its prompt then has tokens of the output, so what it reports is not the client's prompt's.
    upstream.faults.cut_after = 12
    (outputs,) = run(engine, [request()]).values()
    assert outputs[-1].num_cached_tokens == 0


@pytest.fixture
def structured(made: Made) -> tuple[ScriptedUpstream, HttpEngine, EngineRequest]:
    """An upstream with a structured output, and a request for it that has no other tokens."""
    upstream = made.upstream()
    upstream.faults.output = made.tokenizer.encode("on and " * 10, add_special_tokens=False)
    params = {"grammar": Grammar(GrammarKind.REGEX, "(on and )+"), "temperature": 1.0, "seed": 3}
    asked = request(max_tokens=len(upstream.faults.output), **params)
    return upstream, made.engine(upstream), asked


def test_a_grammar_is_sent_and_its_output_comes(
    structured: tuple[ScriptedUpstream, HttpEngine, EngineRequest],
) -> None:
    upstream, engine, asked = structured
    (outputs,) = run(engine, [asked]).values()
    assert tokens(outputs) == upstream.faults.output
    assert upstream.bodies[-1]["structured_outputs"] == {"regex": "(on and )+"}


def test_a_structured_output_that_broke_is_made_again_and_each_token_comes_once(
    structured: tuple[ScriptedUpstream, HttpEngine, EngineRequest],
) -> None:
    upstream, engine, asked = structured
    upstream.faults.cut_after, upstream.faults.token_s = 4, 0.01
    engine.add(asked)
    outputs: list[EngineOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
        if upstream.faults.num_cut:
            upstream.faults.cut_after = None
    assert tokens(outputs) == upstream.faults.output
    assert upstream.bodies[-1]["prompt"] == PROMPT
    assert upstream.bodies[-1]["seed"] == upstream.bodies[-2]["seed"]


def test_a_structured_output_that_differs_when_it_is_made_again_fails(
    structured: tuple[ScriptedUpstream, HttpEngine, EngineRequest],
) -> None:
    upstream, engine, asked = structured
    assert upstream.faults.output is not None
    earlier = replace(asked, output_token_ids=(*upstream.faults.output[:3], 40))
    (outputs,) = run(engine, [earlier]).values()
    assert outputs[-1].error is ErrorCode.GRAMMAR_FAILED
    assert "send the request again" in outputs[-1].message
    assert tokens(outputs) == []


def test_an_output_that_leaves_its_grammar_fails_before_the_client_gets_it(
    made: Made, structured: tuple[ScriptedUpstream, HttpEngine, EngineRequest]
) -> None:
    upstream, engine, asked = structured
    good = made.tokenizer.encode("on and ", add_special_tokens=False)
    upstream.faults.output = [*good, *made.tokenizer.encode("X", add_special_tokens=False)] * 20
    (outputs,) = run(engine, [asked]).values()
    assert outputs[-1].error is ErrorCode.GRAMMAR_FAILED
    assert tokens(outputs) == good


def test_a_request_that_the_upstream_always_fails_on_ends(made: Made) -> None:
    upstream = made.upstream()
    engine = made.engine(upstream)
    upstream.faults.status = 500
    (outputs,) = run(engine, [request()]).values()
    assert outputs[-1].error is ErrorCode.ENGINE_ERROR
    assert len(upstream.bodies) == engine_module.MAX_VAIN_BREAKS


def test_an_engine_that_nobody_reads_stops_reading(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_UNREAD", 5)
    engine = made.engine(made.upstream())
    engine.add(request(max_tokens=100))
    first = engine.step()
    time.sleep(1)
    assert 5 < engine._num_put - engine._num_taken < 20
    (outputs,) = run(engine, []).values()
    assert tokens([*first, *outputs]) == continued(PROMPT, 100)


def test_the_key_is_read_again_when_its_file_changes(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("one\n")
    upstream = made.upstream(key="one")
    engine = made.engine(upstream, upstream_key_file=str(path))
    assert len(run(engine, [request()])) == 1
    upstream._key = "two"
    path.write_text("")  # as when it is being written
    engine.add(request("b"))
    time.sleep(0.2)
    path.write_text("two\n")
    (outputs,) = run(engine, []).values()
    assert tokens(outputs) == continued(PROMPT, 20)


def test_what_does_not_fit_is_refused_at_the_start(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="PENSTOCK_UPSTREAM_KEY_FILE"):
        made.engine(made.upstream(key="secret"))
    with pytest.raises(ModelError, match=r"serves there; PENSTOCK_UPSTREAM_MODEL"):
        made.engine(made.upstream(), upstream_model="elsewhere")
    other = Made(make_checkpoint(tmp_path, vocab_size=300), made._stack)
    with pytest.raises(ModelError, match="is not that of PENSTOCK_MODEL"):
        made.engine(other.upstream())


def test_an_upstream_that_is_not_used_is_logged_once(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, _ = load_tokenizer_and_eos(make_checkpoint(tmp_path, vocab_size=300))
    other = ScriptedUpstream(tokenizer)
    other._server.config.port = port = free_port()
    engine = made.engine(urls=f"{made.upstream().url}, http://127.0.0.1:{port}")

    def warnings() -> list[str]:
        errors = [str(getattr(record, "error", "")) for record in caplog.records]
        return [error for error in errors if "is not that of PENSTOCK_MODEL" in error]

    with other:
        wait_until(warnings, "the warning")
        time.sleep(3 * PROBE_INTERVAL_S)
    assert len(warnings()) == 1
    assert len(run(engine, [request()])) == 1


def test_the_engine_waits_for_the_first_upstream(made: Made) -> None:
    upstream = made.upstream()
    stages: Counter[str] = Counter()

    def report(stage: str, share: float) -> None:
        stages[stage] += 1
        late.__enter__()

    late = ScriptedUpstream(made.tokenizer)
    late._server.config.port = free_port()
    urls = f"http://127.0.0.1:{late._server.config.port}"
    upstream.__exit__()
    options = EngineOptions(
        checkpoint=str(made.checkpoint), engine="http", upstream_urls=f"{upstream.url}, {urls}"
    )
    built = build_http_engine(options, report)
    built.engine.self_test()
    assert isinstance(built.engine, HttpEngine)
    built.engine.close()
    assert stages == {"waiting for an upstream": 1}
    late.__exit__()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("http://a:8000", (UpstreamAddress("http://a:8000"),)),
        ("http://a:8000/v1/ , ", (UpstreamAddress("http://a:8000"),)),
        (
            "https://a/x weight=2, http://b",
            (UpstreamAddress("https://a/x", 2), UpstreamAddress("http://b")),
        ),
    ],
)
def test_upstreams_are_urls_with_weights(text: str, expected: tuple[UpstreamAddress, ...]) -> None:
    assert parse_upstreams(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a:8000", "http://"),
        ("ftp://a", "http://"),
        ("http://", "host"),
        ("http://key@a", "UPSTREAM_KEY_FILE"),
        ("http://a?x=1", "query"),
        ("http://a weight=0", "between 1"),
        ("http://a weight", "weight=N"),
        ("http://a, http://a/", "twice"),
        (",".join(f"http://a{number}" for number in range(65)), "at most 64"),
    ],
)
def test_a_wrong_upstream_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_upstreams(text)
