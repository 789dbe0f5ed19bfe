"""NativeSource: models of the families that this code has layers for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from shared.cores import default_threads
from worker.engine_options import EngineOptions
from worker.model.config.model_config import ModelConfig
from worker.model.cpu.input_sizes import measure_inputs
from worker.model.cpu.tiers import choose_tier
from worker.model.device import choose_kv_dtype
from worker.model.errors import ModelError
from worker.model.layers.decoder import CausalLM
from worker.model.layers.linear_method import LinearMethod
from worker.model.parallel.group import Placement
from worker.model.parallel.plan import check_divisible, rank_config
from worker.model.served import KERNELS, LAYOUT, WEIGHTS, BuiltStack, Progress
from worker.model.tier import Tier, TierRequest
from worker.model.weights.loader import Checkpoint, fill_with_noise, noise_layouts


class NativeSource:
    """A ModelSource over worker.model.layers."""

    name = "native"

    def __init__(self, directory: Path) -> None:
        """Raises UnsupportedModel for another family, CheckpointError for files at fault."""
        self._directory = directory
        self.config = ModelConfig.from_directory(directory)

    def end_sequences_with(self, eos_token_ids: frozenset[int]) -> None:
        self.config = replace(self.config, eos_token_ids=eos_token_ids)

    def check_divisible(self, size: int) -> None:
        check_divisible(self.config, size)

    def load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        block_size: int,
        report: Progress,
    ) -> BuiltStack:
        """Loads the weights and gives them to the tier's products. Raises ModelError."""
        config = rank_config(self.config, placement.group)
        tier = _choose_tier(options, config, placement, max_model_len, block_size, report)
        report(WEIGHTS, 0.0)
        try:
            model = self._load(options, placement, max_model_len, tier, partial(report, WEIGHTS))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the weights do not fit in the memory of {placement.device}"
            ) from error
        report(WEIGHTS, 1.0)
        report(LAYOUT, 0.0)
        if tier.ops.measures_inputs:
            measure_inputs(model, config)
        model.finish()
        report(LAYOUT, 1.0)
        return BuiltStack(
            model=model,
            keeps=config,
            kv_dtype=choose_kv_dtype(options.kv_cache_dtype, placement.dtype),
            stack=lambda pool: tier.stack(model, pool),
            tier=tier.name,
            has_own_threads=tier.has_own_threads,
        )

    def _load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        tier: Tier,
        report: Callable[[float], None],
    ) -> CausalLM:
        """Returns the model with its weights, in the form that the tier's methods store."""
        is_dummy = options.load_format == "dummy"
        checkpoint = None if is_dummy else Checkpoint(self._directory, self.config)
        stored: dict[str, LinearMethod] = {}
        if tier.fp8_method is not None:
            layouts = checkpoint.fp8_layouts() if checkpoint else noise_layouts(self.config)
            stored = {name: tier.fp8_method(layout) for name, layout in layouts.items()}
        model = CausalLM(self.config, max_model_len, placement, tier.ops, stored)
        if checkpoint is None:
            fill_with_noise(model)
        else:
            checkpoint.load(model, report)
        return model


def _choose_tier(
    options: EngineOptions,
    config: ModelConfig,
    placement: Placement,
    max_model_len: int,
    block_size: int,
    report: Progress,
) -> Tier:
    """Returns the tier of the device, before any weight is read. Raises ModelError."""
    request = TierRequest(
        config=config,
        dtype=placement.dtype,
        block_size=block_size,
        quantization=options.quantization,
        attention=options.attention_backend,
        kv_dtype=choose_kv_dtype(options.kv_cache_dtype, placement.dtype),
        num_threads=options.num_threads or default_threads(),
        num_ranks=placement.group.size,
        weight_copies=options.cpu_weight_copies,
        memory_share=options.memory_share,
        compiling=partial(report, KERNELS),
    )
    if placement.device.type == "cpu":
        return choose_tier(options.cpu_tier, request)
    for name, value, neutral in (
        ("cpu_tier", options.cpu_tier, "auto"),
        ("quantization", options.quantization, "none"),
    ):
        if value != neutral:
            raise ModelError(f"{name} {value!r} is for the CPU, the device is {placement.device}")
    # Not above: its kernels need Triton, which a CPU's build of PyTorch lacks.
    from worker.model.cuda.tier import cuda_tier

    return cuda_tier(options, request, placement, -(-max_model_len // block_size))
