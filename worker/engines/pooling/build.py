"""From EngineOptions to a PoolingEngine over a loaded model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shared.messages import MAX_EMBEDDED_TOKENS
from worker.engine.interface import BuiltEngine, Progress
from worker.engine_options import EngineOptions
from worker.engines.pooling.engine import PoolingEngine
from worker.engines.pooling.model import PoolingModel
from worker.model.config.pooling import PoolingConfig
from worker.model.config.stored_dtype import stored_dtype
from worker.model.device import choose_device, choose_dtypes
from worker.model.errors import UnsupportedModel

BLOCK_SIZE = 16
STEPS_TAKEN = 64  # a worker takes jobs for that many steps, and leaves the rest to other workers


def build_pooling_engine(
    options: EngineOptions, pooling: PoolingConfig, report: Progress
) -> BuiltEngine:
    """Loads the model. Raises ModelError.

    The dtype "auto" is float32 on CPUs: vectors are compared with those that others computed.
    """
    if options.tensor_parallel_size > 1:
        raise UnsupportedModel("tensor_parallel_size must be 1 for a model that makes embeddings")
    directory = Path(options.checkpoint)
    device = choose_device(options.device)
    stored = "float32" if device.type == "cpu" else stored_dtype(directory) or "float32"
    dtype, _ = choose_dtypes(options.dtype, "auto", stored, device)
    report("loading weights", 0.0)
    model = PoolingModel(directory, pooling, device, dtype)
    report("loading weights", 1.0)
    max_model_len = min(options.max_model_len or pooling.max_input_tokens, pooling.max_input_tokens)
    num_tokens = STEPS_TAKEN * options.batched_tokens(is_cuda=device.type == "cuda")
    config = options.engine_config(
        num_blocks=-(-max(num_tokens, MAX_EMBEDDED_TOKENS) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        is_cuda=device.type == "cuda",
    )
    config = replace(config, preempts=False, prefix_caching=False)
    vocab_size = model.vocab_size
    return BuiltEngine(
        engine=PoolingEngine(config, vocab_size, pooling.size, model.embed),
        config=config,
        vocab_size=vocab_size,
        num_parameters=model.num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        embedding_size=pooling.size,
    )
