"""NativeSource: a ModelSource for the families of worker.model.layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from worker.engine_options import EngineOptions
from worker.model.attention.input_sizes import measure_inputs
from worker.model.config.model_config import ModelConfig
from worker.model.device import weights_fit
from worker.model.errors import ModelError
from worker.model.layers.decoder import CausalLM
from worker.model.layers.linear_method import LinearMethod
from worker.model.parallel.group import Placement
from worker.model.parallel.plan import check_divisible, rank_config
from worker.model.served import KERNELS, LAYOUT, WEIGHTS, BuiltStack, Progress
from worker.model.tier import Tier, choose_tier
from worker.model.weights.loader import Checkpoint, DummyWeights, open_weights


class NativeSource:
    """A ModelSource over worker.model.layers."""

    name = "native"

    def __init__(self, directory: Path, eos_token_ids: frozenset[int] | None = None) -> None:
        """Raises UnsupportedModel for another family, CheckpointError for files at fault."""
        self._directory = directory
        self.config = ModelConfig.from_directory(directory)
        if eos_token_ids is not None:
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
        weights = open_weights(self._directory, self.config, options.load_format)
        if options.quantization == "fp8" and not weights.fp8_layouts:
            raise ModelError(
                "quantization 'fp8': the checkpoint has no weights that are multiplied in FP8, per "
                "tensor, per row or in blocks of 128"
            )
        if options.kv_cache_dtype != "auto" and isinstance(weights, Checkpoint):
            weights.check_kv_scales()
        tier = choose_tier(
            options, config, placement, max_model_len, block_size, partial(report, KERNELS)
        )
        report(WEIGHTS, 0.0)
        with weights_fit(placement.device):
            model = self._load(weights, placement, max_model_len, tier, partial(report, WEIGHTS))
        report(WEIGHTS, 1.0)
        report(LAYOUT, 0.0)
        with weights_fit(placement.device):  # layouts are copies
            if tier.ops.measures_inputs:
                measure_inputs(model, config)
            model.finish()
        report(LAYOUT, 1.0)
        return BuiltStack(
            model=model,
            keeps=config,
            kv_dtype=placement.kv_dtype,
            stack=lambda pool: tier.stack(model, pool),
            tier=tier.name,
            has_own_threads=tier.has_own_threads,
        )

    def _load(
        self,
        weights: Checkpoint | DummyWeights,
        placement: Placement,
        max_model_len: int,
        tier: Tier,
        report: Callable[[float], None],
    ) -> CausalLM:
        """Returns the model with its weights, in the form that the tier's methods store."""
        stored: dict[str, LinearMethod] = {}
        if tier.fp8_method is not None:
            stored = {name: tier.fp8_method(one) for name, one in weights.fp8_layouts.items()}
        model = CausalLM(self.config, max_model_len, placement, tier.ops, stored)
        weights.load(model, report)
        return model
