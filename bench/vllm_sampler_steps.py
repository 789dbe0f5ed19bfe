"""The part of vllm_sampler that runs in vLLM's interpreter."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from shared.messages import SamplingParams
from worker.engine.request import EngineRequest
from worker.engines.vllm.requests import to_extra_args
from worker.engines.vllm.sampler import PenstockLogitsProcessor

DEMO = Path(__file__).parents[1] / "worker/demo/checkpoint"
PROMPT = list(range(3, 103))
HISTORY = 100  # output tokens that are there already
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.5},
}


def logits_of(num_rows: int, vocab: int) -> torch.Tensor:
    """Returns [rows, vocab]: a bell and above it some tokens that are likely, as models have it."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(num_rows, vocab, generator=generator) * 2.5
    places = torch.randint(0, vocab, (num_rows, 100), generator=generator)
    return logits.scatter_add_(1, places, torch.linspace(12, 0, 100).expand(num_rows, 100))


def metadata(num_rows: int, outputs: list[list[int]], **values: Any) -> SamplingMetadata:
    temperature = values.get("temperature", 0.0)
    frequency = values.get("frequency_penalty", 0.0)
    top_p = values.get("top_p")
    rows = range(num_rows) if temperature else ()
    return SamplingMetadata(
        temperature=torch.full((num_rows,), temperature) if temperature else None,
        all_greedy=not temperature,
        all_random=bool(temperature),
        top_p=None if top_p is None else torch.full((num_rows,), top_p),
        top_k=None,
        generators={i: torch.Generator().manual_seed(i) for i in rows},
        max_num_logprobs=None,
        no_penalties=not frequency,
        prompt_token_ids=torch.tensor([PROMPT] * num_rows) if frequency else None,
        frequency_penalties=torch.full((num_rows,), frequency),
        presence_penalties=torch.zeros(num_rows),
        repetition_penalties=torch.ones(num_rows),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=values.get("logitsprocs") or LogitsProcessors(),
    )


def processor_of(
    num_rows: int, vocab: int, outputs: list[list[int]], values: dict[str, Any]
) -> PenstockLogitsProcessor:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(DEMO), get_vocab_size=lambda: vocab),
        scheduler_config=SimpleNamespace(max_num_seqs=num_rows),
    )
    processor = PenstockLogitsProcessor(config, torch.device("cpu"), False)
    added = []
    for i in range(num_rows):
        params = SamplingParams(max_tokens=10_000, seed=i, **values)
        request = EngineRequest(request_id=str(i), prompt_token_ids=tuple(PROMPT), params=params)
        theirs = VllmParams(temperature=0.0, extra_args=to_extra_args(request, i))
        added.append((i, theirs, PROMPT, outputs[i]))
    processor.update_state(BatchUpdate(num_rows, removed=(), added=added, moved=()))
    return processor


def median_ms(
    sample: Callable[[torch.Tensor], Any],
    logits: torch.Tensor,
    outputs: list[list[int]],
    steps: int,
) -> float:
    took_s = []
    for step in range(steps + 1):
        copy = logits.clone()
        begin_s = time.perf_counter()
        sampled = sample(copy).sampled_token_ids
        if step:  # the first warms up
            took_s.append(time.perf_counter() - begin_s)
        for output, (token,) in zip(outputs, sampled.tolist(), strict=True):
            output.append(token)
    return round(statistics.median(took_s) * 1e3, 2)


@torch.inference_mode()
def main() -> None:
    threads, steps = int(sys.argv[1]), int(sys.argv[2])
    numbers = [[int(number) for number in each.split(",")] for each in sys.argv[3:5]]
    torch.set_num_threads(threads)
    sampler = Sampler()
    for vocab in numbers[1]:
        for num_rows in numbers[0]:
            logits = logits_of(num_rows, vocab)
            for kind, values in KINDS.items():
                outputs = [[(i * 31 + j) % 4000 for j in range(HISTORY)] for i in range(num_rows)]
                own = processor_of(num_rows, vocab, outputs, values)
                behind = metadata(num_rows, outputs, logitsprocs=LogitsProcessors([own]))
                figures = {
                    "penstock_ms": median_ms(
                        partial(sampler, sampling_metadata=behind),
                        logits,
                        outputs,
                        steps,
                    )
                }
                theirs = metadata(num_rows, outputs, **values)
                figures["vllm_ms"] = median_ms(
                    partial(sampler, sampling_metadata=theirs),
                    logits,
                    outputs,
                    steps,
                )
                what = {"kind": kind, "vocab": vocab, "rows": num_rows, "threads": threads}
                print(json.dumps(what | figures), flush=True)


if __name__ == "__main__":
    main()
