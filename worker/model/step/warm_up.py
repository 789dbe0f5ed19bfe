"""Runs the first steps of a model, over blocks that no sequence owns."""

from __future__ import annotations

from functools import partial

import torch

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engine.config import EngineConfig
from worker.model.served import KERNELS, Progress
from worker.model.step.runner import TorchModelRunner

# On the CPU a warm-up only shows that a step works; on CUDA it loads the kernels of a full one.
_CPU_TOKENS = 16
# A suffix of a cached prefix, whose keys are divided: those of a whole prompt are not.
_CUDA_SUFFIX = 16
# FP8 products in blocks have kernels for up to 16 rows, up to 64, and more.
_CUDA_TOKENS = 64
_FILTERED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=0)
# Without top_k: torch's operators sort all tokens of a row then.
_WIDEST = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    logprobs=20,
    seed=0,
)
# What the kernels that draw tokens are compiled for: so that no answer waits for a compiler.
_CUDA_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, presence_penalty=0.5, seed=0),
)


def warm_up(
    runner: TorchModelRunner, config: EngineConfig, device: torch.device, report: Progress
) -> None:
    """Runs the first steps, and captures CUDA graphs where the stack has them, so that no job waits
    for a compiler."""
    longest = min(config.max_model_len, config.capacity_tokens)  # without a window's freed blocks
    num_groups = len(config.windows)
    num_tokens = min(config.max_num_batched_tokens, longest)
    if device.type != "cuda":
        num_tokens = min(num_tokens, _CPU_TOKENS)
    stage, runs = "warming up", [(num_tokens, _FILTERED)]
    if device.type == "cuda":  # some 40 seconds at a first start: Triton keeps them
        stage = KERNELS
        runs += [(min(num_tokens, _CUDA_TOKENS), _FILTERED), *((1, each) for each in _CUDA_PARAMS)]
    for number, (tokens, params) in enumerate(runs):
        report(stage, number / len(runs))
        run_prefill(runner, config.block_size, tokens, params, num_kv_groups=num_groups)
    if device.type == "cuda" and longest > _CUDA_SUFFIX:
        past = longest - _CUDA_SUFFIX
        run_prefill(runner, config.block_size, _CUDA_SUFFIX, past=past, num_kv_groups=num_groups)
    report(stage, 1.0)
    runner.capture(partial(report, "capturing CUDA graphs"))


def run_prefill(
    runner: TorchModelRunner,
    block_size: int,
    num_tokens: int,
    params: SamplingParams = _FILTERED,
    *,
    past: int = 0,
    num_kv_groups: int = 1,
) -> None:
    """Runs one step over blocks that no sequence owns, with `past` tokens before it."""
    sequence = prefill(block_size, num_tokens, params, past=past, num_kv_groups=num_kv_groups)
    batch = ScheduledBatch((sequence,))
    runner.launch(batch).collect()
    runner.launch(ScheduledBatch((), (-1,))).collect()


def run_widest_sample(
    runner: TorchModelRunner, block_size: int, num_rows: int, num_kv_groups: int = 1
) -> None:
    """Runs a step of `widest_batch`."""
    runner.launch(widest_batch(block_size, num_rows, num_kv_groups)).collect()
    runner.launch(ScheduledBatch((), tuple(range(-num_rows, 0)))).collect()


def widest_batch(block_size: int, num_rows: int, num_kv_groups: int = 1) -> ScheduledBatch:
    """Returns `num_rows` prompts of one token, each with every sampling parameter."""
    return ScheduledBatch(
        tuple(
            prefill(block_size, 1, _WIDEST, seq_id, num_kv_groups=num_kv_groups)
            for seq_id in range(-num_rows, 0)
        )
    )


def prefill(
    block_size: int,
    num_tokens: int,
    params: SamplingParams = _FILTERED,
    seq_id: int = -1,
    past: int = 0,
    num_kv_groups: int = 1,
) -> ScheduledSequence:
    """Returns the last `num_tokens` of a prompt, from whose last one a token is drawn."""
    tokens = [0] * (past + num_tokens)
    return ScheduledSequence(
        seq_id=seq_id,
        start=past,
        num_scheduled_tokens=num_tokens,
        token_ids=tokens[past:],
        block_table=range(-(-len(tokens) // block_size) * num_kv_groups),
        samples=True,
        params=params,
        prompt_token_ids=tokens,
        output_token_ids=(),
    )
