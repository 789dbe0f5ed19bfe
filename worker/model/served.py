"""ServedModel, ModelSource, OtherRanks: the interfaces of a loaded model, its loader, its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions
from worker.model.base import DecoderStack, KeepsKV, KVLayer
from worker.model.kv_cache import KVCachePool
from worker.model.parallel.group import Placement


class ServedConfig(Protocol):
    """The bounds of a model, from its checkpoint."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def context_length(self) -> int:
        """Longest sequence that the positions were made for."""
        ...

    @property
    def dtype(self) -> str:
        """The checkpoint's: one of worker.model.config.model_config.DTYPES."""
        ...

    @property
    def kv_layers(self) -> Sequence[KVLayer]:
        """What each layer keeps in the KV cache."""
        ...


class ServedModel(Protocol):
    """A loaded model."""

    @property
    def config(self) -> ServedConfig: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def num_parameters(self) -> int: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [rows, vocab] of what a DecoderStack returned for these rows."""
        ...


Report = Callable[[float], None]  # gets the share that is done, 0 to 1
# Gets the stage of a model that loads, and its progress, 0 to 1.
Progress = Callable[[str, float], None]
WEIGHTS, KERNELS, LAYOUT = "loading weights", "compiling kernels", "laying out weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStack:
    """A model with its weights, and what computes its layers over a pool."""

    model: ServedModel
    keeps: KeepsKV  # what this rank keeps in the KV cache
    kv_dtype: torch.dtype
    stack: Callable[[KVCachePool], DecoderStack]
    tier: str  # of the CPU; on CUDA "triton", or "reference" where torch's operators compute
    has_own_threads: bool = False  # torch computes next to nothing of a step
    release: Callable[[], None] = lambda: None  # gives up what the model keeps of the last stack


@runtime_checkable
class CapturingStack(Protocol):
    """A DecoderStack that captures steps before it is used, to replay them."""

    def capture(self, report: Report, *, largest_only: bool = False) -> None:
        """Captures; with `largest_only` what takes the memory of all. Raises what a step does."""
        ...

    def best_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Returns the most likely tokens [rows] int64 of the rows that the last call returned, and
        their logits [rows] float32; None where those are still to be computed.

        There may be further rows, which mean nothing. Valid until the next step.
        """
        ...


class ModelSource(Protocol):
    """One way from a checkpoint to a model. Made from a directory, and the tokens that end a
    sequence (None: those of its configuration); raises ModelError there for what it cannot serve,
    before any weight is read."""

    name: str

    @property
    def config(self) -> ServedConfig: ...

    def check_divisible(self, size: int) -> None:
        """Raises UnsupportedModel where `size` ranks cannot divide the model."""
        ...

    def load(
        self,
        options: EngineOptions,
        placement: Placement,
        max_model_len: int,
        block_size: int,
        report: Progress,
    ) -> BuiltStack:
        """Loads the weights, for positions below `max_model_len`. Raises ModelError."""
        ...


class OtherRanks(Protocol):
    """Ranks 1 and up of a model, as rank 0 sees them."""

    def send(self, batch: ScheduledBatch) -> None:
        """Sends a step, which they begin to compute. Raises RanksLost."""
        ...

    def lost(self, error: Exception) -> NoReturn:
        """Ends the engine after an exception in a step that the ranks compute together."""
        ...

    def close(self) -> None:
        """Ends them. Idempotent."""
        ...
