"""From EngineOptions to a VllmEngine that is ready for its first step."""

from __future__ import annotations

import importlib.util

from shared.text.checkpoint_text import load_tokenizer_and_eos
from worker.engine.config import EngineConfig
from worker.engine_options import EngineOptions
from worker.engine_process.interface import BuiltEngine, Progress
from worker.model.device import available_host_bytes
from worker.model.errors import ModelError
from worker.vllm.options import engine_args, set_environment


def build_vllm_engine(options: EngineOptions, report: Progress) -> BuiltEngine:
    """Loads the model into vLLM. Raises ModelError or ValueError with a sentence."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("ENGINE=vllm needs vLLM in the interpreter that ENGINE_PYTHON names")
    report("importing vLLM", 0.0)
    set_environment()
    import vllm
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    from worker.vllm.engine import VllmEngine
    from worker.vllm.sampler import keeps_to_grammars
    from worker.vllm.stats import StatsReader

    report("importing vLLM", 1.0)
    args = engine_args(
        options, device=current_platform.device_type, free_bytes=available_host_bytes()
    )
    stats = StatsReader()
    report("loading weights", 0.0)
    llm = LLMEngine.from_engine_args(EngineArgs(**args), stat_loggers=[stats.logger])
    model, cache = llm.vllm_config.model_config, llm.vllm_config.cache_config
    num_blocks = (cache.num_gpu_blocks or 1) - 1  # the null block holds nothing
    if num_blocks < 1:
        raise ModelError("vLLM has no KV cache for this model")
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=llm.vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=min(model.max_model_len, num_blocks * cache.block_size),
        max_waiting=options.max_waiting,
        prefix_caching=bool(cache.enable_prefix_caching),
        policy=options.scheduling_policy,
        eos_token_ids=frozenset(load_tokenizer_and_eos(options.checkpoint)[1]),
        structured_output=options.structured_output and all(llm.collective_rpc(keeps_to_grammars)),
    )
    vocab_size = model.get_vocab_size()
    return BuiltEngine(
        engine=VllmEngine(llm, config, vocab_size, stats),
        config=config,
        vocab_size=vocab_size,
        num_parameters=0,
        dtype=str(model.dtype).removeprefix("torch."),
        version=vllm.__version__,
    )
