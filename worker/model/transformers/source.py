"""TransformersSource: builds models of any architecture that transformers has."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from worker.engine_options import EngineOptions
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCachePool
from worker.model.layers.decoder import DecoderStack
from worker.model.layers.linear import Placement
from worker.model.served import BuiltStack, Report
from worker.model.transformers.attention import PagedAttention
from worker.model.transformers.config import TransformersConfig, read_config
from worker.model.transformers.loader import load_model, random_model
from worker.model.transformers.model import TransformersModel, TransformersStack, check_attention
from worker.model.transformers.probe import probe
from worker.model.transformers.sharding import check_plan, rank_calls

logger = logging.getLogger(__name__)


class TransformersSource:
    """A ModelSource over transformers' own modules; see docs/adr/0046."""

    name = "transformers"

    def __init__(self, directory: Path) -> None:
        """Raises UnsupportedModel, before any weight is read, for what cannot be served."""
        self._directory = directory
        config = read_config(directory)
        self._calls = probe(config)
        self.config: TransformersConfig = replace(
            config, kv_layers=tuple(call.kept for call in self._calls)
        )

    def end_sequences_with(self, eos_token_ids: frozenset[int]) -> None:
        self.config = replace(self.config, eos_token_ids=eos_token_ids)

    def check_divisible(self, size: int) -> None:
        check_plan(self.config, self._calls, size)

    def load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        block_size: int,
        report: Report,
    ) -> BuiltStack:
        """Loads the weights. Raises ModelError."""
        for name, value, known in (
            ("cpu_tier", options.cpu_tier, ("auto", "reference")),
            ("quantization", options.quantization, ("none",)),
        ):
            if value not in known:
                raise ModelError(
                    f"{name} {value!r} is for native model families; this model_type, "
                    f"{self.config.model_type!r}, is computed by transformers"
                )
        group = placement.group
        attention = PagedAttention(self._calls)
        if options.load_format == "dummy":
            if group.size > 1:
                raise ModelError(
                    f"load_format 'dummy' with TENSOR_PARALLEL_SIZE={group.size} is for native "
                    f"model families"
                )
            network = random_model(self.config, placement, attention.name)
        else:
            network = load_model(self.config, self._directory, placement, attention.name, report)
        keeps = self.config
        if group.size > 1:
            calls = rank_calls(network, attention, self._calls)
            attention.replace(calls)
            keeps = replace(keeps, kv_layers=tuple(call.kept for call in calls))
        model = TransformersModel(self.config, network, attention, placement)

        def stack(pool: KVCachePool) -> DecoderStack:
            made = TransformersStack(model, pool)
            check_attention(model, made, pool)
            return made

        return BuiltStack(model=model, keeps=keeps, stack=stack, tier="reference")
