"""StepGraphs: steps captured once for each padded shape and then replayed.

A step of 28 layers is some 300 launches, whose Python takes longer than their kernels. A CUDA graph
launches them in one call, with the addresses that it was captured with: a step's tensors are copied
into buffers that stay; missing rows are padding.

Steps of decodes alone are padded to sizes near each other. Steps with chunks of prompts are padded
to fewer sizes of tokens and fewer yet of decodes. A step with more tokens than the largest takes
the device longer than its launches take the host: see `launch_bound_tokens`.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from worker.engine.errors import DeviceLost
from worker.model.base import AttentionMetadata, RunInto
from worker.model.cuda.drawing import BestTokens
from worker.model.cuda.gemv import MAX_ROWS
from worker.model.cuda.step_buffers import GraphShape, StepBuffers
from worker.model.device import step_failure

logger = logging.getLogger(__name__)

# Above some 200 tokens a product's time grows with its rows, and padding costs as much as it has.
_MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512)
_MIXED_DECODES = (0, 16, 64, 256)
_MIXED_CHUNKS = 16
# These are for models that are launched for longer than they compute.
_LARGE_TOKENS = (768, 1024, 1536, 2048, 3072, 4096)
_LARGE_CHUNKS = 64
# Tokens times the numbers in a layer's products, which 400 TFLOP/s compute in 0.085 ms: the ten
# launches of a layer take a fast host that long, the hosts of docs/BENCHMARKS.md twice.
_LAUNCH_BOUND = 17e9
_TIMED_TURNS = 12

T = TypeVar("T")


class Capture(Protocol):
    """Captures what a function does."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that does it again, and returns the same tensors, computed anew."""
        ...

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        """Returns which of some captured functions takes the device the least time."""
        ...


class CapturedStack(Protocol):
    """A DecoderStack whose steps can be captured."""

    hidden_size: int  # of what it returns of a token
    dtype: torch.dtype

    @property
    def run_gemv_into(self) -> RunInto | None:
        """Another `run_into`, for up to MAX_ROWS tokens; None without one."""
        ...

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor: ...

    def run_into(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, out: Tensor
    ) -> None:
        """Computes a step as a RunInto does."""
        ...


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Returns the padded sizes, ascending; the last is at least `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


def launch_bound_tokens(layer_weights: int) -> int:
    """Returns the tokens of the largest step with chunks that a graph makes faster; `layer_weights`
    are the numbers in the products of a layer."""
    large = [count for count in _LARGE_TOKENS if count * layer_weights <= _LAUNCH_BOUND]
    return max((_MIXED_TOKENS[-1], *large))


def mixed_shapes(max_num_seqs: int, max_num_tokens: int) -> list[GraphShape]:
    """Returns the padded shapes of steps with chunks, ascending by tokens and then by decodes."""
    sizes = (*_MIXED_TOKENS, *_LARGE_TOKENS)
    shapes = set()
    for count in sizes[: bisect_left(sizes, max_num_tokens) + 1]:
        is_large = count in _LARGE_TOKENS
        numbers = (0, max_num_seqs) if is_large else (*_MIXED_DECODES, max_num_seqs)
        chunks = _LARGE_CHUNKS if is_large else _MIXED_CHUNKS
        for decodes in numbers:
            shapes.add(GraphShape(count, min(decodes, max_num_seqs, count), chunks))
    return sorted(shapes)


class StepGraphs:
    """A DecoderStack: replays captured steps, leaves other steps to the stack."""

    def __init__(
        self,
        stack: CapturedStack,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        device: torch.device,
        logits: Callable[[Tensor], Tensor],
        num_kv_groups: int = 1,
        is_foreign: bool = False,
    ) -> None:
        """`max_num_tokens` are those of the largest step with chunks that is captured, 0 for none,
        `max_blocks` those of the longest sequence in each KV group.

        `logits` returns [rows, vocab] of hidden states [rows, hidden]. The code of a stack that
        `is_foreign` is not this project's: no step is captured where a capture fails. Until
        `capture` nothing is replayed.
        """
        self._stack = stack
        self._device = device
        self._logits = logits
        self._decodes = [GraphShape(size, size) for size in decode_sizes(max_num_seqs)]
        self._is_foreign = is_foreign
        self._mixed = mixed_shapes(max_num_seqs, max_num_tokens) if max_num_tokens else []
        self._of_logits = BestTokens(self._decodes[-1].tokens, device)
        largest = [self._decodes[-1], *self._mixed[-1:]]
        self._buffers = StepBuffers.zeros(
            max(shape.tokens for shape in largest),
            max(shape.sequences for shape in largest),
            max_blocks,
            num_kv_groups,
            stack.hidden_size,
            stack.dtype,
            device,
        )
        self._steps: dict[GraphShape, Callable[[], None]] = {}
        self._best: dict[GraphShape, Callable[[], tuple[Tensor, Tensor]]] = {}
        self._last: GraphShape | None = None  # of the last call, if it was of decodes and replayed

    def capture(self, report: Callable[[float], None], *, largest_only: bool = False) -> None:
        """Captures all shapes, the largest first: the others fit into its memory.

        If memory runs out, the captured shapes are replayed and a warning is logged. `report`
        gets the share that is done. Raises what a step raises, DeviceLost among it.
        """
        begin_s, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        capture = CudaCapture(self._device, looks_for_reads=self._is_foreign)
        self.capture_by(capture, report, largest_only=largest_only)
        logger.info(
            "captured %d CUDA graphs of decode steps and %d of mixed steps in %.1f s, %.0f MiB",
            len(self._best),
            len(self._steps) - len(self._best),
            time.monotonic() - begin_s,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    @torch.inference_mode()
    def capture_by(
        self, capture: Capture, report: Callable[[float], None], *, largest_only: bool = False
    ) -> None:
        """Captures by `capture`, as `capture` does."""
        decodes, mixed = self._decodes, self._mixed
        if largest_only:
            decodes, mixed = decodes[-1:], mixed[-1:]
        shapes = sorted([*decodes, *mixed], reverse=True)
        for number, shape in enumerate(shapes):
            report(number / len(shapes))
            failure = None
            try:
                self._capture_shape(shape, capture)
            except Exception as error:
                failure = step_failure(error, self._device)
                if failure is None:
                    if not self._is_foreign:
                        raise
                    self._capture_nothing(error)
                    return report(1.0)
            if isinstance(failure, DeviceLost):
                raise failure
            if failure is not None and self._steps:
                break  # smaller ones would take their own memory as well
        if len(self._steps) < len(shapes):
            logger.warning(
                "GPU memory ran out while capturing CUDA graphs: captured %d of %d shapes, up to "
                "%d tokens; other steps launch their kernels one by one, which is slower",
                len(self._steps),
                len(shapes),
                max((shape.tokens for shape in self._steps), default=0),
            )
        self._decodes = [shape for shape in decodes if shape in self._steps]
        self._mixed = [shape for shape in mixed if shape in self._steps]
        report(1.0)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        shape = self.shape_of(metadata)
        self._last = None
        if shape not in self._steps:
            return self._stack(token_ids, positions, metadata, rows)
        self._buffers.fill(shape, token_ids, positions, metadata)
        self._steps[shape]()
        if shape.chunks:
            return self._buffers.hidden.index_select(0, rows)
        self._last = shape
        return self._buffers.hidden[: metadata.num_tokens]  # of a decode each token is wanted

    def best_tokens(self) -> tuple[Tensor, Tensor] | None:
        """Returns the most likely tokens [rows] int64 of all rows of the last call and their logits
        [rows] float32, the first for the first row; None where it did not replay decodes alone.

        There may be more rows, of padding. They hold until the next replay: graphs share memory.
        """
        return None if self._last is None else self._best[self._last]()

    def shape_of(self, metadata: AttentionMetadata) -> GraphShape | None:
        """Returns the smallest shape with room for a step; None without one."""
        num_decodes, num_tokens = metadata.num_decodes, metadata.num_tokens
        if num_tokens == num_decodes:
            index = bisect_left(self._decodes, GraphShape(num_tokens, num_tokens))
            return self._decodes[index] if index < len(self._decodes) else None
        num_chunks = len(metadata.query_lens) - num_decodes
        for shape in self._mixed[bisect_left(self._mixed, GraphShape(num_tokens, num_decodes)) :]:
            if shape.decodes >= num_decodes and shape.chunks >= num_chunks:
                return shape
        return None

    def _capture_nothing(self, error: Exception) -> None:
        """Gives all graphs up after a capture that failed."""
        self._steps, self._best = {}, {}
        self._decodes, self._mixed = [], []
        logger.warning(
            "steps of this model cannot be captured as CUDA graphs, so that each launches its "
            "kernels one by one, which is slower: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )

    def _capture_shape(self, shape: GraphShape, capture: Capture) -> None:
        """Captures a step. Few rows have two variants, of which the faster one here is kept."""
        step = capture(partial(self._run, shape, run_into=self._stack.run_into))
        if not shape.chunks:
            run_gemv_into = self._stack.run_gemv_into
            if shape.tokens <= MAX_ROWS and run_gemv_into is not None:
                ways = (step, capture(partial(self._run, shape, run_into=run_gemv_into)))
                chosen = capture.fastest(ways)
                logger.debug(
                    "replaying CUDA graph for %d tokens (variant %d)", shape.tokens, chosen
                )
                step = ways[chosen]
            self._best[shape] = capture(partial(self._run_best, shape))
        self._steps[shape] = step

    def _run(self, shape: GraphShape, run_into: RunInto) -> None:
        """Computes the final hidden states of the buffers' tokens."""
        buffers, tokens = self._buffers, shape.tokens
        run_into(
            buffers.token_ids[:tokens],
            buffers.positions[:tokens],
            buffers.metadata(shape),
            buffers.hidden[:tokens],
        )

    def _run_best(self, shape: GraphShape) -> tuple[Tensor, Tensor]:
        """Returns the best tokens of the last hidden states, and their logits."""
        return self._of_logits(self._logits(self._buffers.hidden[: shape.tokens]))


class CudaCapture:
    """Captures functions as CUDA graphs, whose memory is one pool."""

    def __init__(self, device: torch.device, *, looks_for_reads: bool = False) -> None:
        """`looks_for_reads`: raises RuntimeError where the host waits, before a capture, which
        would be left in a bad state."""
        self._device = device
        self._looks_for_reads = looks_for_reads
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        """Runs `run` twice: the first time kernels are compiled, and cuBLAS allocates what it
        keeps."""
        run()
        if self._looks_for_reads:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which collects garbage each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                self._end(graph)
                raise
            graph.capture_end()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed: the stream and the allocator must not stay in it."""
        try:
            graph.capture_end()
        except RuntimeError:  # it was invalid; torch then leaves the allocator in it
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        """Replays them in turns, and compares the medians."""
        times: list[list[float]] = [[] for _ in replays]
        for _ in range(_TIMED_TURNS):
            for replay, of_replay in zip(replays, times, strict=True):
                begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                begin.record()
                replay()
                end.record()
                end.synchronize()
                of_replay.append(begin.elapsed_time(end))
        medians = [statistics.median(of_replay[1:]) for of_replay in times]
        return medians.index(min(medians))
