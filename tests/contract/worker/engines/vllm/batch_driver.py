"""Drives the sampler with vLLM's InputBatch: a program for the interpreter that has vLLM.

Requests come, are preempted, come back and end in random order, rows are condensed and swapped by
vLLM's own code. Each request's tokens are compared with those that it draws alone. With `is_async`
the lists hold placeholders for tokens in flight, which vLLM's own code fills in before the draw.
Prints one line of JSON with counts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm import SamplingParams as VllmParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from shared.messages import SamplingParams
from worker.engine.request import EngineRequest
from worker.engines.vllm.requests import to_extra_args
from worker.engines.vllm.sampler import PenstockLogitsProcessor
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Sampler

DEMO = Path(__file__).parents[5] / "worker/demo/checkpoint"
VOCAB, MAX_ROWS, MAX_LEN = 64, 8, 128
CPU = torch.device("cpu")
NOTHING = torch.empty(0, dtype=torch.int64)


@dataclass
class Request:
    """A request, what it has drawn so far, and what it draws alone."""

    seq_id: int
    params: SamplingParams
    prompt: list[int]
    resumed: list[int]
    expected: list[int]
    state: CachedRequestState
    drawn: list[int] = field(default_factory=list)


def logits_of(seq_id: int, position: int) -> torch.Tensor:
    """Returns [VOCAB]: what a model would say there, whatever stands before."""
    generator = torch.Generator().manual_seed(seq_id * 1000 + position)
    return torch.randn(VOCAB, generator=generator) * 3


def alone(sampler: Sampler, seq_id: int, params: SamplingParams, prompt: list[int]) -> list[int]:
    outputs: list[int] = []
    for _ in range(params.max_tokens):
        position = len(prompt) + len(outputs)
        row = SamplingRow(seq_id, params, prompt, list(outputs), position)
        logits = logits_of(seq_id, position)[None]
        outputs.append(int(sampler.sample(logits, [row], NOTHING).token_ids[0]))
    return outputs


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(4, 40),
        seed=rng.randrange(2**40),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        top_k=rng.choice([0, 0, 5]),
        frequency_penalty=rng.choice([0.0, 0.0, 1.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
        min_tokens=rng.choice([0, 0, 3]),
        logit_bias=rng.choice([{}, {3: 5.0}]),
    )


class Run:
    """One batch of vLLM's through many steps."""

    def __init__(self, seed: int, *, is_async: bool) -> None:
        self.rng = random.Random(seed)
        self.is_async = is_async
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(DEMO), get_vocab_size=lambda: VOCAB),
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS),
        )
        self.processor = PenstockLogitsProcessor(config, CPU, False)
        self.batch = InputBatch(
            max_num_reqs=MAX_ROWS,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=MAX_LEN,
            device=CPU,
            vocab_size=VOCAB,
            block_sizes=[16],
            max_num_blocks_per_req=[MAX_LEN // 16],
            logitsprocs=LogitsProcessors([self.processor]),
            logitsprocs_need_output_token_ids=True,
        )
        ends = frozenset({0, 2})  # the demo checkpoint's
        self.sampler = Sampler(VOCAB, max_num_seqs=1, eos_token_ids=ends, device=CPU)
        self.running: dict[str, Request] = {}
        self.preempted: list[Request] = []
        self.next_seq_id = 0
        self.counts = dict.fromkeys(("drawn", "wrong", "preempted", "swapped"), 0)

    def new_request(self) -> Request:
        seq_id, params = self.next_seq_id, any_params(self.rng)
        self.next_seq_id += 1
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 20))]
        expected = alone(self.sampler, seq_id, params, prompt)
        self.sampler.forget([seq_id])
        resumed = expected[: self.rng.choice([0, 0, self.rng.randrange(len(expected))])]
        request = EngineRequest(
            request_id=str(seq_id), prompt_token_ids=tuple(prompt), params=params
        )
        state = CachedRequestState(
            req_id=str(seq_id),
            prompt_token_ids=[*prompt, *resumed],
            mm_features=[],
            sampling_params=VllmParams(temperature=0.0, extra_args=to_extra_args(request, seq_id)),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        return Request(seq_id, params, prompt, resumed, expected, state, [*resumed])

    def step(self) -> None:
        """As the model runner: removes, adds, condenses, may swap, then samples."""
        for request in list(self.running.values()):
            if len(request.drawn) >= len(request.expected):
                self._leave(request)
            elif self.rng.random() < 0.05:
                self._leave(request)
                self.preempted.append(request)
                self.counts["preempted"] += 1
        while len(self.running) < MAX_ROWS and self.rng.random() < 0.5:
            self._enter()
        self.batch.condense()
        if self.batch.num_reqs > 1 and self.rng.random() < 0.3:
            self.batch.swap_states(*self.rng.sample(range(self.batch.num_reqs), 2))
            self.counts["swapped"] += 1
        self.batch.refresh_metadata()
        if self.batch.num_reqs:
            self._sample()

    def _leave(self, request: Request) -> None:
        self.batch.remove_request(request.state.req_id)
        del self.running[request.state.req_id]

    def _enter(self) -> None:
        if self.preempted and self.rng.random() < 0.7:
            request = self.preempted.pop(self.rng.randrange(len(self.preempted)))
            if self.is_async:  # a token in flight is dropped: what is known is listed anew
                known = request.drawn[len(request.resumed) :]
                request.state.output_token_ids = list(known)
        else:
            request = self.new_request()
        self.running[request.state.req_id] = request
        self.batch.add_request(request.state)

    def _sample(self) -> None:
        batch = self.batch
        batch.update_async_output_token_ids()
        requests = [self.running[req_id] for req_id in batch.req_ids]
        rows = [logits_of(r.seq_id, len(r.prompt) + len(r.drawn)) for r in requests]
        token_ids = self.processor.apply(torch.stack(rows)).argmax(dim=1)
        for request, token in zip(requests, token_ids.tolist(), strict=True):
            self.counts["drawn"] += 1
            self.counts["wrong"] += token != request.expected[len(request.drawn)]
            request.drawn.append(token)
            request.state.output_token_ids.append(-1 if self.is_async else token)
        if self.is_async:
            batch.prev_req_id_to_index = {req_id: i for i, req_id in enumerate(batch.req_ids)}
            ready = SimpleNamespace(synchronize=lambda: None)
            batch.set_async_sampled_token_ids(token_ids[:, None], ready)  # type: ignore[arg-type]


def placeholder_raises() -> int:
    """Returns 1 when a history that ends with a placeholder is refused."""
    run = Run(0, is_async=True)
    while not any(not request.params.greedy for request in run.running.values()):
        run.step()
    request = next(each for each in run.running.values() if not each.params.greedy)
    request.state.output_token_ids.append(-1)
    try:
        run.processor.apply(torch.zeros(run.batch.num_reqs, VOCAB))
    except RuntimeError:
        return 1
    return 0


@torch.inference_mode()
def main() -> None:
    found: dict[str, int] = {}
    for is_async in (False, True):
        for seed in range(4):
            run = Run(seed, is_async=is_async)
            for _ in range(150):
                run.step()
            for name, count in run.counts.items():
                key = f"async_{name}" if is_async else name
                found[key] = found.get(key, 0) + count
    found["placeholder_raises"] = placeholder_raises()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
