"""The engine as its caller sees it: requests, outputs, cancel, resume, faults."""

from __future__ import annotations

import pytest

from shared.messages import ErrorCode, FinishReason, Grammar, GrammarKind, TokenLogprob
from tests.unit.worker.engine.scripted_runner import (
    EOS,
    VOCAB_SIZE,
    ScriptedRunner,
    Story,
    make_engine,
    make_request,
    run_to_end,
    tell,
)
from worker.engine.engine import Engine
from worker.engine.errors import EngineFull, IntegrityError, RequestRefused
from worker.engine.ports import StepResult
from worker.engine.request import EngineRequest

LOOKAHEADS = pytest.mark.parametrize("lookahead", [0, 1])


def say(length: int) -> list[int]:
    return [100 + i for i in range(length)]


def end(story: Story) -> tuple[FinishReason | None, int | None, ErrorCode | None]:
    return story.last.finish_reason, story.last.stop_reason, story.last.error


@pytest.mark.promise("Engine: add, step, unfinished; prompts may be token ids")
@pytest.mark.promise("Engine: an end frees all blocks; `ignore_eos` continues")
@pytest.mark.promise("HTTP: an end frees blocks and tables")
@LOOKAHEADS
def test_a_request_runs_to_max_tokens_and_gives_everything_back(lookahead: int) -> None:
    engine = make_engine(lookahead=lookahead)
    engine.add(make_request(max_tokens=6))
    story = run_to_end(engine)["a"]
    assert story.token_ids == say(6)
    assert all(len(output.token_ids) == 1 for output in story.outputs)
    assert end(story) == (FinishReason.LENGTH, None, None)
    stats = engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 6)
    assert not engine.has_unfinished()
    assert engine.step() == []


@LOOKAHEADS
def test_eos_ends_it_and_what_was_launched_after_it_is_dropped(lookahead: int) -> None:
    runner = ScriptedRunner(lambda item: EOS if item.output_index == 2 else 5)
    engine = make_engine(runner, lookahead=lookahead)
    engine.add(make_request(max_tokens=50))
    story = run_to_end(engine)["a"]
    assert story.token_ids == [5, 5, EOS]
    assert end(story) == (FinishReason.STOP, None, None)
    assert len(runner.steps) == 3 + lookahead


@LOOKAHEADS
def test_ignore_eos_runs_to_max_tokens(lookahead: int) -> None:
    engine = make_engine(ScriptedRunner(lambda item: EOS), lookahead=lookahead)
    engine.add(make_request(max_tokens=9, ignore_eos=True))
    story = run_to_end(engine)["a"]
    assert (story.token_ids, story.last.finish_reason) == ([EOS] * 9, FinishReason.LENGTH)


def test_a_stop_token_is_returned_and_named() -> None:
    engine = make_engine()
    engine.add(make_request(max_tokens=50, stop_token_ids=(102,)))
    story = run_to_end(engine)["a"]
    assert story.token_ids == [100, 101, 102]
    assert end(story) == (FinishReason.STOP, 102, None)


def test_the_context_ends_a_sequence_by_length() -> None:
    engine = make_engine(max_model_len=8)
    engine.add(make_request(prompt=range(5), max_tokens=50))
    assert run_to_end(engine)["a"].token_ids == say(3)


def test_logprobs_come_with_their_tokens_only_on_request() -> None:
    engine = make_engine()
    engine.add(make_request("with", logprobs=0, max_tokens=2))
    engine.add(make_request("without", max_tokens=2))
    stories = run_to_end(engine)
    assert [o.logprobs for o in stories["with"].outputs] == [
        (TokenLogprob(100, -0.5),),
        (TokenLogprob(101, -0.5),),
    ]
    assert all(output.logprobs is None for output in stories["without"].outputs)


@pytest.mark.promise("Grammars: requests with a grammar are refused for workers without support")
@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (make_request(prompt=()), ErrorCode.PAYLOAD_INVALID, "no tokens"),
        (make_request(prompt=range(200)), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "200 tokens"),
        (make_request(prompt=[1] * 65), ErrorCode.KV_CAPACITY_EXCEEDED, "never fit"),
        (make_request(outputs=[1] * 62), ErrorCode.KV_CAPACITY_EXCEEDED, "65 tokens"),
        (make_request(prompt=[1, VOCAB_SIZE]), ErrorCode.PAYLOAD_INVALID, "prompt names a token"),
        (make_request(prompt=[-1, 1]), ErrorCode.PAYLOAD_INVALID, "prompt names a token"),
        (make_request(outputs=[VOCAB_SIZE]), ErrorCode.PAYLOAD_INVALID, "output names a token"),
        (
            make_request(logit_bias={VOCAB_SIZE: 1.0}),
            ErrorCode.PAYLOAD_INVALID,
            "logit_bias names a token",
        ),
        (make_request(seed=None), ErrorCode.PAYLOAD_INVALID, "seed"),
        (
            make_request(grammar=Grammar(GrammarKind.REGEX, "a")),
            ErrorCode.GRAMMAR_FAILED,
            "structured output",
        ),
    ],
)
def test_what_could_never_run_is_refused_with_a_reason(
    request_: EngineRequest, code: ErrorCode, words: str
) -> None:
    engine = make_engine(num_blocks=16, block_size=4)
    with pytest.raises(RequestRefused, match=words) as refusal:
        engine.add(request_)
    assert refusal.value.code is code
    assert not engine.has_unfinished()


def test_a_live_id_is_refused_and_a_finished_one_can_come_again() -> None:
    engine = make_engine()
    engine.add(make_request("a", max_tokens=1))
    with pytest.raises(RequestRefused, match="'a' is running already"):
        engine.add(make_request("a"))
    run_to_end(engine)
    engine.add(make_request("a", max_tokens=2))
    assert run_to_end(engine)["a"].token_ids == say(2)


def test_the_waiting_queue_is_bounded_by_the_config() -> None:
    engine = make_engine(max_waiting=2)
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    with pytest.raises(EngineFull, match="2 sequences"):
        engine.add(make_request("c"))
    engine.step()
    engine.add(make_request("c"))
    assert sorted(run_to_end(engine)) == ["a", "b", "c"]


def test_two_engines_in_one_process_do_not_touch() -> None:
    engines = [make_engine(), make_engine(num_blocks=8, block_size=2)]
    for engine in engines:
        engine.add(make_request(max_tokens=5))
    stories: list[dict[str, Story]] = [{}, {}]
    while any(engine.has_unfinished() for engine in engines):
        for engine, story in zip(engines, stories, strict=True):
            tell(story, engine.step())
            engine.check_integrity()
    assert [story["a"].token_ids for story in stories] == [say(5), say(5)]


class TestCancel:
    @pytest.mark.promise("Runtime: cancel in every state, idempotent")
    @LOOKAHEADS
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 9])
    def test_works_in_every_state_and_frees_the_blocks_at_once(
        self, lookahead: int, num_steps: int
    ) -> None:
        engine = make_engine(max_num_batched_tokens=8, lookahead=lookahead)
        engine.add(make_request("a", range(20), max_tokens=20))
        stories: dict[str, Story] = {}
        for _ in range(num_steps):
            tell(stories, engine.step())
        assert engine.cancel("a") is True
        assert engine.cancel("a") is False
        stats = engine.stats()
        assert (stats.free_blocks, stats.running, stats.waiting) == (stats.total_blocks, 0, 0)
        assert run_to_end(engine) == {}

    @LOOKAHEADS
    def test_works_on_a_preempted_one(self, lookahead: int) -> None:
        engine = make_engine(num_blocks=8, lookahead=lookahead)
        engine.add(make_request("old", range(12), max_tokens=19))
        engine.add(make_request("young", range(100, 112), max_tokens=19))
        stories: dict[str, Story] = {}
        while not engine.stats().preemptions:
            tell(stories, engine.step())
        assert engine.cancel("young") is True
        for name, story in run_to_end(engine).items():
            assert name == "old"
            assert story.last.finish_reason is FinishReason.LENGTH

    def test_wins_over_a_finish_that_is_still_on_the_device(self) -> None:
        engine = make_engine(lookahead=1)
        engine.add(make_request(max_tokens=1))
        assert engine.step() == []  # launched, not seen
        assert engine.cancel("a") is True
        assert run_to_end(engine) == {}
        assert engine.stats().generated_tokens == 0

    def test_of_an_unknown_or_finished_one_says_no(self) -> None:
        engine = make_engine()
        assert engine.cancel("nobody") is False
        engine.add(make_request(max_tokens=1))
        run_to_end(engine)
        assert engine.cancel("a") is False

    def test_of_one_does_not_change_another_that_shares_its_prefix(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", range(20), max_tokens=20))
        engine.step()
        engine.add(make_request("b", range(20), max_tokens=20))
        engine.step()
        engine.cancel("a")
        stories = run_to_end(engine)
        assert stories["b"].token_ids == say(20)[1:]  # its first came in the step above
        engine.add(make_request("c", range(20), max_tokens=1))
        assert run_to_end(engine)["c"].last.num_cached_tokens == 16


class TestResume:
    @pytest.mark.promise(
        "Runtime: only generated tokens are streamed, and none again after recomputing"
    )
    @LOOKAHEADS
    @pytest.mark.parametrize("num_known", [1, 3, 4, 5])
    def test_goes_on_after_the_known_tokens_and_repeats_none(
        self, lookahead: int, num_known: int
    ) -> None:
        engine = make_engine(lookahead=lookahead)
        engine.add(make_request(outputs=say(num_known), max_tokens=6))
        story = run_to_end(engine)["a"]
        assert story.token_ids == say(6)[num_known:]
        assert story.last.finish_reason is FinishReason.LENGTH
        assert engine.stats().prompt_tokens == 3
        assert engine.stats().generated_tokens == 6 - num_known

    @pytest.mark.parametrize(
        ("outputs", "params", "reason", "stop_reason"),
        [
            ([1, EOS], {}, FinishReason.STOP, None),
            ([1, 7], {"stop_token_ids": (7,)}, FinishReason.STOP, 7),
            ([1, 2, 3, 4], {}, FinishReason.LENGTH, None),
        ],
    )
    def test_at_a_stop_ends_without_sampling(
        self, outputs: list[int], params: dict, reason: FinishReason, stop_reason: int | None
    ) -> None:
        runner = ScriptedRunner()
        engine = make_engine(runner)
        engine.add(make_request(outputs=outputs, **params))
        assert engine.has_unfinished()
        story = run_to_end(engine)["a"]
        assert end(story) == (reason, stop_reason, None)
        assert story.token_ids == []
        assert runner.steps == []

    def test_at_the_end_of_the_context_ends_by_length(self) -> None:
        engine = make_engine(max_model_len=8)
        engine.add(make_request(prompt=range(5), outputs=[1, 2, 3], max_tokens=50))
        assert run_to_end(engine)["a"].last.finish_reason is FinishReason.LENGTH

    def test_counts_known_tokens_towards_min_tokens(self) -> None:
        engine = make_engine(ScriptedRunner(lambda item: EOS))
        engine.add(make_request(outputs=[1, 2], min_tokens=3, max_tokens=9))
        assert run_to_end(engine)["a"].token_ids == [EOS]

    def test_at_a_stop_it_can_be_cancelled_and_keeps_its_id_until_then(self) -> None:
        engine = make_engine()
        engine.add(make_request(outputs=[EOS]))
        with pytest.raises(RequestRefused, match="running already"):
            engine.add(make_request())
        assert engine.cancel("a") is True
        assert engine.cancel("a") is False
        assert not engine.has_unfinished()

    def test_reports_cached_tokens_of_the_prompt_alone(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", range(6), max_tokens=30))
        reply = run_to_end(engine)["a"].token_ids
        engine.add(make_request("b", range(6), outputs=reply[:20], max_tokens=30))
        story = run_to_end(engine)["b"]
        assert story.token_ids == reply[20:]
        assert story.last.num_cached_tokens == 6
        assert engine.stats().prefix_hit_tokens == 24


class TestFaults:
    @LOOKAHEADS
    def test_a_sequence_that_fails_alone_ends_alone(self, lookahead: int) -> None:
        runner = ScriptedRunner(failures={1: {0: "nonfinite_logits"}, 3: {1: "no such code"}})
        engine = make_engine(runner, lookahead=lookahead)
        for name in ("a", "b", "c"):
            engine.add(make_request(name, max_tokens=9))
        stories = run_to_end(engine)
        assert end(stories["a"]) == (FinishReason.ERROR, None, ErrorCode.NONFINITE_LOGITS)
        assert stories["a"].token_ids == say(1)
        assert end(stories["b"]) == (FinishReason.ERROR, None, ErrorCode.ENGINE_ERROR)
        assert stories["b"].token_ids == say(3)
        assert stories["c"].token_ids == say(9)

    def test_a_runners_own_sentence_reaches_the_caller(self) -> None:
        runner = ScriptedRunner(failures={0: {0: "grammar_failed: no text: fits"}})
        engine = make_engine(runner)
        engine.add(make_request())
        last = run_to_end(engine)["a"].last
        assert last.error is ErrorCode.GRAMMAR_FAILED
        assert last.message.endswith(": no text: fits")

    def test_a_sequence_may_fail_in_the_middle_of_its_prefill(self) -> None:
        runner = ScriptedRunner(failures={0: {0: "nonfinite_logits"}})
        engine = make_engine(runner, max_num_batched_tokens=8)
        engine.add(make_request(prompt=range(20)))
        story = run_to_end(engine)["a"]
        assert story.last.error is ErrorCode.NONFINITE_LOGITS
        assert len(runner.steps) == 1

    @pytest.mark.parametrize(
        "result",
        [StepResult({}), StepResult({0: VOCAB_SIZE}), StepResult({0: -1}), StepResult({0: 5})],
    )
    def test_a_runner_that_gives_no_valid_answer_fails_that_sequence(
        self, result: StepResult
    ) -> None:
        engine = make_engine(ScriptedRunner(results={0: result}))
        engine.add(make_request(logprobs=1))
        story = run_to_end(engine)["a"]
        assert story.last.error is ErrorCode.ENGINE_ERROR
        assert story.token_ids == []

    def test_a_broken_book_comes_out_as_integrity_error(self) -> None:
        engine = make_engine()
        engine.add(make_request(max_tokens=9))
        engine.step()
        engine._scheduler.running.first.block_table.append(5)
        with pytest.raises(IntegrityError):
            engine.check_integrity()


def test_stats_tell_prefilling_from_active() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add(make_request("a", [1, 2], max_tokens=30))
    engine.add(make_request("b", range(30), max_tokens=30))
    engine.add(make_request("c", [1], max_tokens=30))
    engine.step()
    stats = engine.stats()
    assert (stats.step, stats.active, stats.prefilling) == (1, 1, 1)
    assert (stats.running, stats.waiting) == (2, 1)
    assert stats.total_blocks - stats.free_blocks == 9
    for _ in range(4):
        engine.step()
    assert (engine.stats().active, engine.stats().prefilling) == (2, 0)


@pytest.mark.promise("Streaming: one scheduler, online and offline, independent of web and queue")
def test_an_engine_is_made_of_its_config_alone() -> None:
    with pytest.raises(ValueError, match="lookahead"):
        make_engine(lookahead=2)
    with pytest.raises(ValueError, match="num_blocks"):
        make_engine(num_blocks=0)
    assert isinstance(make_engine(), Engine)
