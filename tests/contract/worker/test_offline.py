"""The offline call over a real checkpoint, and its command line."""

from __future__ import annotations

import gc
import io
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from shared.messages import FinishReason, SamplingParams
from tests.support.checkpoints import make_checkpoint
from worker.llm import LLM, main

PROMPTS = ["The keeper counts to", "Water", "In the morning the lake is still and"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), dtype="float32", device="cpu", num_kv_blocks=64, block_size=4)


def test_prompts_together_say_what_each_says_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=2)
    together = llm.generate(PROMPTS, params, progress=False)
    for prompt, result in zip(PROMPTS, together, strict=True):
        alone = llm.generate([prompt], params, progress=False)[0]
        assert (alone.text, alone.token_ids) == (result.text, result.token_ids)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) > 0


def test_a_prompt_is_scored_for_all_its_results(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, temperature=1.0, seed=5, prompt_logprobs=2)
    results = llm.generate(PROMPTS[:1], params, progress=False, n=3)
    assert [result.text for result in results] == [""] * 3
    scores = results[0].prompt_logprobs
    assert scores is not None
    assert len(scores) == results[0].num_prompt_tokens - 1
    assert all(len(entry.top) == 2 and entry.logprob < 0 for entry in scores)
    assert [result.prompt_logprobs for result in results] == [scores] * 3


@pytest.mark.parametrize("way", ["closed", "left"])
def test_an_llm_that_ends_frees_its_kv_blocks_and_their_folder(
    checkpoint: Path, tmp_path: Path, way: str
) -> None:
    options = {
        "dtype": "float32",
        "device": "cpu",
        "num_kv_blocks": 16,
        "block_size": 4,
        "kv_offloading_gb": 0.01,
        "kv_offloading_dir": str(tmp_path),
    }
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    results = []
    for _ in range(2):
        llm = LLM(str(checkpoint), **options)
        results.append(llm.generate(PROMPTS, greedy, progress=False))
        engine, disk = weakref.ref(llm._engine), llm._engine._scheduler.blocks.offload.disk
        slots = weakref.ref(disk._slots)
        if way == "closed":
            with llm:
                pass
            llm.close()
            with pytest.raises(RuntimeError, match="closed"):
                llm.generate(PROMPTS, greedy, progress=False)
        else:
            del llm
        del disk
        gc.collect()
        assert engine() is None
        assert slots() is None
    assert results[0] == [replace(one, num_cached_tokens=0) for one in results[1]]
    assert [folder.name for folder in tmp_path.iterdir()] == ["penstock-kv-0"], "free for the next"


def test_the_text_is_cut_before_a_stop_string(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    whole = llm.generate(PROMPTS[:1], greedy, progress=False)[0].text
    stop = whole[5:8]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))
    result = llm.generate(PROMPTS[:1], params, progress=False)[0]
    assert result.text == whole[: whole.index(stop)]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)


def test_the_command_prints_a_json_line_for_each_prompt(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Water\n\nThe lake\n"))
    arguments = ["--model", str(checkpoint), "--prompt", "first", "--file", "-", "--json"]
    options = ["--max-tokens", "4", "--temperature", "0", "--device", "cpu", "--no-progress"]
    assert main([*arguments, *options]) == 0
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["first", "Water", "The lake"]
    assert all(line["finish_reason"] in ("stop", "length") for line in lines)
    assert "\r" not in output.err
