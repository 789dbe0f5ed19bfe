"""What a model says after every token of given texts, through any of the CPU's tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.model.attention.input_sizes import measure_inputs
from worker.model.config.model_config import ModelConfig
from worker.model.cpu.tiers import choose_tier
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch
from worker.model.tier import TierRequest
from worker.model.weights.loader import Checkpoint

_BLOCK_SIZE = 16


def forced_logits(
    path: Path,
    texts: Sequence[Sequence[int]],
    *,
    tier: str,
    quantization: str = "none",
    attention: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    chunk: int = 1 << 30,
) -> list[torch.Tensor]:
    """[tokens, vocab] float32 for each text; all texts run side by side, `chunk` tokens a step.

    A stack says only what follows the last tokens of a step, so each step is run once for each of
    its tokens, up to there: the keys and values before it are written again as they were.
    """
    config = ModelConfig.from_directory(path)
    cpu = torch.device("cpu")
    longest = max(map(len, texts))
    request = TierRequest(
        config=config,
        dtype=dtype,
        block_size=_BLOCK_SIZE,
        quantization=quantization,
        attention=attention,
    )
    chosen = choose_tier(tier, request)
    model = CausalLM(config, longest, Placement(cpu, dtype), chosen.ops)
    Checkpoint(path, model.config).load(model)
    if chosen.ops.measures_inputs:
        measure_inputs(model, config)
    model.finish()
    width = -(-longest // _BLOCK_SIZE)
    pool = KVCachePool(config, width * len(texts), _BLOCK_SIZE, device=cpu, dtype=dtype)
    stack = chosen.stack(model, pool)
    results: list[list[torch.Tensor]] = [[] for _ in texts]
    for end in range(1, longest + 1):
        start = (end - 1) // chunk * chunk
        running = [i for i, text in enumerate(texts) if len(text) >= end]
        batch = ForwardBatch.build(
            ScheduledBatch(
                tuple(
                    ScheduledSequence(
                        i,
                        start,
                        end - start,
                        list(texts[i][start:end]),
                        range(i * width, (i + 1) * width),
                        False,
                        SamplingParams(),
                        list(texts[i]),
                        [],
                    )
                    for i in running
                )
            ),
            block_size=_BLOCK_SIZE,
            vocab_size=config.vocab_size,
            device=cpu,
            previous=PreviousSample(torch.empty(0, dtype=torch.int64), {}),
        )
        last = batch.metadata.cu_q[1:] - 1
        with torch.inference_mode():
            hidden = stack(batch.input_ids, batch.positions, batch.metadata, last)
            logits = model.logits(hidden).float()
        for i, row in zip(running, logits, strict=True):
            results[i].append(row)
    return [torch.stack(result) for result in results]
