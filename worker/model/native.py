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
from worker.model.cpu.tiers import Tier, TierRequest, choose_tier
from worker.model.device import choose_kv_dtype
from worker.model.errors import ModelError
from worker.model.layers.decoder import CausalLM
from worker.model.layers.fp8 import Fp8Layout
from worker.model.parallel.group import Placement
from worker.model.parallel.plan import check_divisible, rank_config
from worker.model.served import KERNELS, LAYOUT, WEIGHTS, BuiltStack, Progress
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
        report(WEIGHTS, 0.0)
        try:
            model = self._model(options, placement, max_model_len, partial(report, WEIGHTS))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"the weights do not fit in the memory of {placement.device}"
            ) from error
        report(WEIGHTS, 1.0)
        config = rank_config(self.config, placement.group)
        compiling = partial(report, KERNELS)
        tier = _tier(options, config, placement, max_model_len, block_size, compiling)
        report(LAYOUT, 0.0)
        if options.quantization == "int8":
            measure_inputs(model, config)
        model.use(tier.ops)
        report(LAYOUT, 1.0)
        return BuiltStack(
            model=model,
            keeps=config,
            kv_dtype=choose_kv_dtype(options.kv_cache_dtype, placement.dtype),
            stack=lambda pool: tier.stack(model, pool),
            tier=tier.name,
            has_own_threads=tier.has_own_threads,
        )

    def _model(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        report: Callable[[float], None],
    ) -> CausalLM:
        """Returns the model with its weights."""
        is_dummy = options.load_format == "dummy"
        checkpoint = None if is_dummy else Checkpoint(self._directory, self.config)
        layouts: dict[str, Fp8Layout] = {}
        if self.config.fp8 is not None and _keeps_fp8(options, placement):
            layouts = checkpoint.fp8_layouts() if checkpoint else noise_layouts(self.config)
        model = CausalLM(self.config, max_model_len, placement, layouts)
        if checkpoint is None:
            fill_with_noise(model)
        else:
            checkpoint.load(model, report)
        return model


def _keeps_fp8(options: EngineOptions, placement: Placement) -> bool:
    """Returns whether weights in FP8 stay so; elsewhere they become the model's dtype."""
    if placement.device.type == "cpu":
        return False
    # Here and not above: see _tier.
    from worker.model.cuda.tier import keeps_fp8

    return keeps_fp8(options, placement)


def _tier(
    options: EngineOptions,
    config: ModelConfig,
    placement: Placement,
    max_model_len: int,
    block_size: int,
    compiling: Callable[[float], None],
) -> Tier:
    request = TierRequest(
        config=config,
        dtype=placement.dtype,
        block_size=block_size,
        quantization=options.quantization,
        kv_dtype=choose_kv_dtype(options.kv_cache_dtype, placement.dtype),
        num_threads=options.num_threads or default_threads(),
        num_ranks=placement.group.size,
        weight_copies=options.cpu_weight_copies,
        memory_share=options.memory_share,
        compiling=compiling,
    )
    if placement.device.type == "cpu":
        return choose_tier(options.cpu_tier, request)
    for name, value, neutral in (
        ("cpu_tier", options.cpu_tier, "auto"),
        ("quantization", options.quantization, "none"),
    ):
        if value != neutral:
            raise ModelError(f"{name} {value!r} is for the CPU, the device is {placement.device}")
    # Here and not above: its kernels need Triton, which a CPU's build of PyTorch lacks.
    from worker.model.cuda.tier import cuda_tier

    return cuda_tier(options, request, placement, -(-max_model_len // block_size))
