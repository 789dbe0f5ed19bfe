"""LLM.generate over the echo runner: order, parameters, stops, progress, errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from shared.messages import ErrorCode, FinishReason, InvalidParameter, SamplingParams
from worker import llm as generation_progress
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.errors import RequestRefused
from worker.engine.ports import ModelRunner
from worker.engines.echo import EchoModelRunner
from worker.llm import LLM, main, rates


class LetterTokenizer:
    """One token a character: its code point. 0 is EOS and has no text."""

    vocab_size = 256
    special_texts: Sequence[str] = ()

    def least_tokens(self, text: str) -> int:
        return 0

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> LetterDetokenizer:
        return LetterDetokenizer()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class LetterDetokenizer:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids if token_id)

    def flush(self) -> str:
        return ""


def make_llm(runner: ModelRunner | None = None, **changes: object) -> tuple[LLM, Engine]:
    values = {"num_blocks": 64, "block_size": 4, "eos_token_ids": frozenset({0}), **changes}
    engine = Engine(
        EngineConfig(**values),  # type: ignore[arg-type]
        runner or EchoModelRunner(256, eos_token_id=0),
    )
    return LLM.from_parts(engine, LetterTokenizer()), engine


def test_several_results_for_a_prompt_come_one_after_another_and_share_its_computation() -> None:
    llm, engine = make_llm()
    prompts = ["abcdefghi", "xyz"]
    results = llm.generate(prompts, SamplingParams(max_tokens=20), progress=False, n=3)
    assert [result.text for result in results] == ["abcdefghi"] * 3 + ["xyz"] * 3
    assert [result.num_cached_tokens for result in results] == [0, 8, 8, 0, 0, 0]
    assert engine.stats().prefix_hit_tokens == 16
    with pytest.raises(InvalidParameter, match="n: must be between 1 and 128, got 0"):
        llm.generate(prompts, n=0)


@pytest.mark.promise(
    "Engine: `generate` keeps the order; one set of parameters, or one for each prompt"
)
def test_results_come_in_the_order_of_the_prompts() -> None:
    llm, _ = make_llm(max_num_seqs=3, max_waiting=5)
    prompts = [chr(97 + i % 26) * (1 + i * 7 % 11) for i in range(100)]
    results = llm.generate(prompts, SamplingParams(max_tokens=30), progress=False)
    assert [result.text for result in results] == prompts
    assert {result.finish_reason for result in results} == {FinishReason.STOP}
    assert [result.num_prompt_tokens for result in results] == [len(p) for p in prompts]
    assert all(result.token_ids[-1] == 0 for result in results)


def test_each_prompt_may_have_its_own_params() -> None:
    llm, _ = make_llm()
    params = [SamplingParams(max_tokens=n, logprobs=n - 1 if n > 1 else None) for n in (1, 2, 3)]
    results = llm.generate(["abcdef"] * 3, params, progress=False)
    assert [result.text for result in results] == ["a", "ab", "abc"]
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 3
    assert results[0].logprobs is None
    assert results[2].logprobs is not None
    assert [(lp.token_id, len(lp.top)) for lp in results[2].logprobs] == [(97, 2), (98, 2), (99, 2)]


def test_prompts_may_be_token_ids() -> None:
    llm, _ = make_llm()
    results = llm.generate([[104, 105], (111, 107)], progress=False)
    assert [result.text for result in results] == ["hi", "ok"]
    assert [result.token_ids for result in results] == [(104, 105, 0), (111, 107, 0)]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_stop_string_ends_the_text_before_it_and_is_named(lookahead: int) -> None:
    llm, engine = make_llm(lookahead=lookahead)
    params = SamplingParams(max_tokens=50, stop=("END", "cdx"))
    result, other = llm.generate(["abENcdEND!", "abc"], params, progress=False)
    assert (result.text, result.stop_reason) == ("abENcd", "END")
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == tuple(b"abENcdEND")
    assert other.text == "abc"  # nothing held back is lost at the end
    assert engine.stats().free_blocks == engine.stats().total_blocks
    assert not engine.has_unfinished()


@pytest.mark.promise("Engine: cached tokens are in the usage")
def test_cached_tokens_are_reported() -> None:
    llm, _ = make_llm()
    llm.generate(["a long common beginning"], progress=False)
    result = llm.generate(["a long common end"], progress=False)[0]
    assert result.num_cached_tokens == 12


def test_seeds_left_open_are_drawn_one_for_each_prompt_and_given_ones_kept() -> None:
    seeds: list[int | None] = []

    class SeedRunner(EchoModelRunner):
        def launch(self, batch):  # type: ignore[no-untyped-def]
            seeds.extend(item.params.seed for item in batch.sequences)
            return super().launch(batch)

    llm, _ = make_llm(SeedRunner(256, eos_token_id=0))
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), progress=False)
    assert len({*seeds} - {None}) == 2
    seeds.clear()
    llm.generate(["a", "b"], SamplingParams(max_tokens=1, seed=7), progress=False)
    assert seeds == [7, 7]


def test_a_prompt_that_could_never_run_is_named_before_anything_runs() -> None:
    llm, engine = make_llm(max_model_len=10)
    with pytest.raises(RequestRefused, match=r"prompt 1: .*12 tokens") as refusal:
        llm.generate(["fine", "x" * 12], progress=False)
    assert refusal.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert engine.stats().step == 0


def test_arguments_that_do_not_fit_are_refused() -> None:
    llm, _ = make_llm()
    with pytest.raises(TypeError, match="prompts is a list"):
        llm.generate("abc")
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling params"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert llm.generate([], progress=False) == []


def test_an_error_of_one_prompt_is_in_its_result_alone() -> None:
    llm, _ = make_llm(EchoModelRunner(256), num_blocks=4)
    params = [SamplingParams(max_tokens=50), SamplingParams(max_tokens=2)]
    grown, small = llm.generate(["abcdefgh", "x"], params, progress=False)
    assert (grown.finish_reason, grown.error) == (
        FinishReason.ERROR,
        ErrorCode.KV_CAPACITY_EXCEEDED,
    )
    assert grown.text == "abcdefgha"  # 16 places, and one token that needs none
    assert "outgrown" in grown.message
    assert small.text == "xx"


def test_after_an_interruption_the_llm_is_as_good_as_new() -> None:
    class Interrupted(EchoModelRunner):
        steps_left = 3

        def launch(self, batch):  # type: ignore[no-untyped-def]
            self.steps_left -= 1
            if self.steps_left == 0:
                raise KeyboardInterrupt
            return super().launch(batch)

    for lookahead in (0, 1):
        llm, engine = make_llm(Interrupted(256, eos_token_id=0), lookahead=lookahead)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abcdefgh"], progress=False)
        engine.check_integrity()
        assert engine.stats().free_blocks == engine.stats().total_blocks
        assert llm.generate(["abc"], progress=False)[0].text == "abc"


@pytest.mark.promise(
    "Engine: an offline `LLM` of configuration, tokenizer, runner and scheduler (unknown options "
    "are refused)"
)
def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"no option 'gpu', 'tensors'; .*block_size"):
        LLM("nowhere", tensors=1, gpu=2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scheduling_policy": "x"}, "scheduling_policy: must be one of fcfs, priority, got 'x'"),
        ({"dtype": "int8"}, "dtype: must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        ({"kv_cache_memory_gb": 0.0}, "kv_cache_memory_gb: must be positive, got 0.0"),
        ({"lookahead": 2}, "lookahead: must be 0 or 1, got 2"),
        ({"step_target_ms": -1}, "step_target_ms: must not be negative, got -1"),
    ],
)
def test_an_invalid_option_is_refused_before_a_model_is_looked_for(
    options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        LLM("nowhere", **options)


def test_an_invalid_option_of_the_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--prompt", "x", "--dtype", "int8"])
    assert ended.value.code == 2
    assert "dtype: must be one of auto, float32" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.promise("Engine: a progress bar with rates that can be turned off")
def test_progress_shows_rates_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(generation_progress, "RATE_INTERVAL_S", 0.0)
    llm, _ = make_llm()
    llm.generate(["abc"] * 5)
    assert "5/5" in terminal.getvalue()
    assert "prefill" in terminal.getvalue()
    assert "decode" in terminal.getvalue()


def test_progress_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    make_llm()[0].generate(["abc"], progress=False)
    assert terminal.getvalue() == ""


def test_progress_writes_no_control_characters_into_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_llm()[0].generate(["abc"] * 5)
    assert capsys.readouterr() == ("", "")


def test_rates_are_tokens_per_second() -> None:
    llm, engine = make_llm()
    before = engine.stats()
    llm.generate(["abcd"] * 2, SamplingParams(max_tokens=2), progress=False)
    assert rates(before, engine.stats(), 2.0) == "prefill 4 tok/s, decode 2 tok/s"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no prompt"),
        (["--prompt", "a", "--model", "/no/such/place"], "there is no directory"),
        (["--prompt", "a", "--max-tokens", "-1"], "max_tokens"),
        (["--file", "/no/such/file"], "No such file"),
        (["--file", sys.executable], f"{sys.executable} is not UTF-8"),
    ],
)
def test_the_command_reports_an_error_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
