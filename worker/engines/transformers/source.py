"""TransformersSource: builds models of any architecture that transformers has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.cores import default_threads
from worker.engine_options import EngineOptions
from worker.engines.transformers.attention import PagedAttention
from worker.engines.transformers.config import TransformersConfig, read_config
from worker.engines.transformers.gates import replace_gated
from worker.engines.transformers.loader import load_model, random_model
from worker.engines.transformers.model import (
    TransformersModel,
    TransformersStack,
    check_attention,
    compare,
    logits_alone,
)
from worker.engines.transformers.probe import probe
from worker.engines.transformers.products import input_sizes, replace_linears, replace_norms
from worker.engines.transformers.sharding import check_plan, rank_calls
from worker.engines.transformers.shortening import shorten
from worker.model.base import DecoderStack
from worker.model.cpu.tiers import Products, choose_products
from worker.model.cuda.tier import uses_kernels, with_graphs
from worker.model.device import weights_fit
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCachePool
from worker.model.layers.ops import TorchOps
from worker.model.parallel.group import Placement
from worker.model.served import KERNELS, LAYOUT, WEIGHTS, BuiltStack, Progress
from worker.model.tier import TierRequest

_TRITON = "triton"  # the tier of CUDA
_FEW = 256  # rows of a matrix so small that one thread does: routers

log = logging.getLogger(__name__)


class TransformersSource:
    """A ModelSource over transformers' own modules; see docs/adr/0046."""

    name = "transformers"

    def __init__(self, directory: Path, eos_token_ids: frozenset[int] | None = None) -> None:
        """Raises UnsupportedModel, before any weight is read, for models that cannot be served."""
        self._directory = directory
        config = read_config(directory)
        self._probe = probe(config)
        self.config: TransformersConfig = replace(
            config, kv_layers=tuple(call.kept for call in self._probe.calls)
        )
        if eos_token_ids is not None:
            self.config = replace(self.config, eos_token_ids=eos_token_ids)

    def check_divisible(self, size: int) -> None:
        check_plan(self.config, self._probe.calls, size)

    def load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        block_size: int,
        report: Progress,
    ) -> BuiltStack:
        """Loads the weights and gives them to the tier's products. Raises ModelError."""
        with weights_fit(placement.device):
            return self._load(options, placement, max_model_len, block_size, report)

    def _load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        block_size: int,
        report: Progress,
    ) -> BuiltStack:
        if options.kv_cache_dtype != "auto":
            raise ModelError(
                f"kv_cache_dtype {options.kv_cache_dtype!r} is for native model families, "
                f"transformers computes model_type {self.config.model_type!r}"
            )
        uses_triton = _uses_triton(options, placement)
        report(WEIGHTS, 0.0)
        group = placement.group
        attention = PagedAttention(self._probe.calls)
        network = self._network(options, placement, attention, report)
        report(WEIGHTS, 1.0)
        keeps = self.config
        if group.size > 1:
            calls = rank_calls(network, attention, self._probe.calls)
            attention.replace(calls)
            keeps = replace(keeps, kv_layers=tuple(call.kept for call in calls))
        model = TransformersModel(self.config, network, attention, placement)

        products = _products(options, placement, block_size, uses_triton, partial(report, KERNELS))
        report(LAYOUT, 0.0)
        # int8 and int4 round by more than what this comparison allows.
        is_compared = products.name != "reference" and options.quantization == "none"
        expected = logits_alone(model) if is_compared else None
        inputs: Mapping[str, Tensor] = {}
        if products.ops.measures_inputs:
            with input_sizes(network) as inputs:
                logits_alone(model)
        self._take_over(network, products, options, placement, inputs)
        if expected is not None:
            is_off, off = compare(model, logits_alone(model), expected)
            if is_off:
                log.warning(
                    "the logits of the tier are off: the weights of the model are read again, and "
                    "torch computes its modules",
                    extra={
                        "tier": products.name,
                        "percent": round(100 * off, 1),
                        "model_type": self.config.model_type,
                    },
                )
                del network
                model.network = None  # type: ignore[assignment]  # its memory goes first
                network = self._network(options, placement, attention, report)
                model = TransformersModel(self.config, network, attention, placement)
        report(LAYOUT, 1.0)
        is_native = attention.is_native(block_size, placement.dtype)
        if products.name == _TRITON or (products.kernels is not None and is_native):
            shorten(network, attention, products.ops, products.kernels, max_model_len)

        def stack(pool: KVCachePool) -> DecoderStack:
            made = TransformersStack(model, pool, products.kernels, uses_triton)
            check_attention(model, made, pool)
            if not uses_triton:
                return made
            return with_graphs(made, options, model, max_model_len, pool)

        return BuiltStack(
            model=model,
            keeps=keeps,
            kv_dtype=placement.dtype,
            stack=stack,
            tier=products.name,
            has_own_threads=(products.kernels is not None and is_native and not _matrices(network)),
            release=attention.release,
        )

    def _network(
        self,
        options: EngineOptions,
        placement: Placement,
        attention: PagedAttention,
        report: Progress,
    ) -> PreTrainedModel:
        """Returns transformers' model with its weights. Raises ModelError."""
        if options.load_format != "dummy":
            return load_model(
                self.config, self._directory, placement, attention.name, partial(report, WEIGHTS)
            )
        if placement.group.size > 1:
            raise ModelError(
                f"load_format 'dummy' with PENSTOCK_TENSOR_PARALLEL_SIZE={placement.group.size} is "
                "for "
                f"native model families"
            )
        return random_model(self.config, placement, attention.name)

    def _take_over(
        self,
        network: PreTrainedModel,
        products: Products,
        options: EngineOptions,
        placement: Placement,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """Replaces the network's modules by those that the tier computes; `inputs` are the
        `input_sizes` of its linear modules, where they are known."""
        if products.name != "reference" or options.quantization != "none":
            ops = products.ops
            replace_gated(network, ops, placement.dtype, inputs)
            replace_linears(network, self._probe.linear_groups, ops, placement.dtype, inputs)
        if products.name == _TRITON or products.kernels is not None:
            replace_norms(network, products.ops, placement.dtype)


def _uses_triton(options: EngineOptions, placement: Placement) -> bool:
    """Returns whether the kernels for CUDA attend. Raises ModelError for options of the CPU, and as
    `uses_kernels` does."""
    if placement.device.type != "cuda":
        return False
    for name, value, neutral in (
        ("cpu_tier", options.cpu_tier, "auto"),
        ("quantization", options.quantization, "none"),
    ):
        if value != neutral:
            raise ModelError(f"{name} {value!r} is for the CPU, the device is {placement.device}")
    return uses_kernels(options, placement.device)


def _matrices(network: PreTrainedModel) -> list[str]:
    """Returns the names of matrices that torch still multiplies with."""
    tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    return [
        name
        for name, parameter in network.named_parameters()
        if parameter.dim() > 1 and id(parameter) not in tables and min(parameter.shape) > _FEW
    ]


def _products(
    options: EngineOptions,
    placement: Placement,
    block_size: int,
    uses_triton: bool,
    compiling: Callable[[float], None],
) -> Products:
    """Returns the products of the device's tier. Raises ModelError for options that it lacks."""
    if placement.group.size > 1:  # transformers' plan divides the modules, and sums between them
        for name, value, known in (
            ("cpu_tier", options.cpu_tier, ("auto", "reference")),
            ("quantization", options.quantization, ("none",)),
        ):
            if value not in known:
                raise ModelError(
                    f"{name} {value!r} with PENSTOCK_TENSOR_PARALLEL_SIZE={placement.group.size} "
                    "is for "
                    f"native model families"
                )
        return Products("reference", TorchOps())
    if uses_triton:
        # Here and not above: it needs Triton.
        from worker.model.cuda.stack import CudaOps

        return Products(_TRITON, CudaOps())
    if placement.device.type == "cpu":
        request = TierRequest(
            config=None,
            dtype=placement.dtype,
            block_size=block_size,
            quantization=options.quantization,
            num_threads=options.num_threads or default_threads(),
            weight_copies=options.cpu_weight_copies,
            memory_share=options.memory_share,
            compiling=compiling,
        )
        return choose_products(options.cpu_tier, request)
    return Products("reference", TorchOps())
