"""DecodeGraphs: steps of single tokens, captured once for each padded size and then replayed.

A step of 28 layers is some 300 launches, whose Python takes longer than their kernels. A CUDA graph
launches them in one call, with the addresses that it was captured with: a step's tensors are copied
into buffers that stay, sequences that are missing are padded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.errors import DeviceLost
from worker.model.attention.base import AttentionMetadata
from worker.model.cuda.kernels.fill_step import fill_step
from worker.model.cuda.stack import CudaStack
from worker.model.device import step_failure

logger = logging.getLogger(__name__)

_COLUMNS_A_PROGRAM = 128

Replay = Callable[[], Tensor]  # returns what the captured function returned, computed anew
Capture = Callable[[Callable[[], Tensor]], Replay]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the padded sizes, ascending; the last is at least `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What captured steps read, int32; the largest graph's are all of it."""

    token_ids: Tensor  # [S]
    positions: Tensor  # [S]
    slots: Tensor  # [S]; -1: padding
    seq_lens: Tensor  # [S]; 0: padding
    table: Tensor  # [S, max_blocks]; columns behind a sequence's end hold anything
    cu_q: Tensor  # [S + 1] 0, 1, 2, ...

    @classmethod
    def zeros(cls, num_rows: int, max_blocks: int, device: torch.device) -> StepBuffers:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            token_ids=zeros(num_rows),
            positions=zeros(num_rows),
            slots=zeros(num_rows).fill_(-1),
            seq_lens=zeros(num_rows),
            table=zeros(num_rows, max_blocks),
            cu_q=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        )

    def fill(
        self, size: int, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Copies a step of at most `size` decodes and makes the rest of `size` rows padding."""
        table = metadata.block_table
        width = table.shape[1]
        fill_step[(size, -(-width // _COLUMNS_A_PROGRAM))](
            self.token_ids,
            self.positions,
            self.slots,
            self.seq_lens,
            self.table,
            token_ids,
            positions,
            metadata.slots,
            metadata.seq_lens,
            table,
            num_rows=len(token_ids),
            width=width,
            to_stride=self.table.stride(0),
            from_stride=table.stride(0),
            COLUMNS=_COLUMNS_A_PROGRAM,
            num_warps=1,
        )

    def metadata(self, size: int) -> AttentionMetadata:
        """Returns a step of `size` decodes over these buffers."""
        ones = (1,) * size
        return AttentionMetadata(
            cu_q=self.cu_q[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.table[:size],
            slots=self.slots[:size],
            num_decodes=size,
            max_query_len=1,
            num_tokens=size,
            query_lens=ones,
            context_lens=ones,
        )


class DecodeGraphs:
    """A DecoderStack: replays steps that are decodes alone, leaves others to the stack."""

    def __init__(
        self, stack: CudaStack, *, max_num_seqs: int, max_blocks: int, device: torch.device
    ) -> None:
        """`max_blocks` are those of the longest sequence. Until `capture` nothing is replayed."""
        self._stack = stack
        self._device = device
        self._sizes = graph_sizes(max_num_seqs)
        self._buffers = StepBuffers.zeros(self._sizes[-1], max_blocks, device)
        self._replays: dict[int, Replay] = {}
        self._captured: Sequence[int] = ()

    def capture(self, report: Callable[[float], None], *, largest_only: bool = False) -> None:
        """Captures all sizes, the largest first: the others fit into its memory.

        Where memory runs out, what has been captured is replayed and a warning says so. `report`
        gets the share that is done. Raises what a step raises, DeviceLost among it.
        """
        begin_s, free = time.monotonic(), torch.cuda.mem_get_info(self._device)[0]
        self.capture_by(CudaCapture(self._device), report, largest_only=largest_only)
        logger.info(
            "captured CUDA graphs: sizes=%d seconds=%.1f mib=%.0f",
            len(self._captured),
            time.monotonic() - begin_s,
            (free - torch.cuda.mem_get_info(self._device)[0]) / 2**20,
        )

    @torch.inference_mode()
    def capture_by(
        self, capture: Capture, report: Callable[[float], None], *, largest_only: bool = False
    ) -> None:
        """Captures by `capture`, as `capture` does."""
        sizes = self._sizes[-1:] if largest_only else self._sizes
        captured: list[int] = []
        for number, size in enumerate(reversed(sizes)):
            report(number / len(sizes))
            failure = None
            try:
                self._replays[size] = capture(functools.partial(self._run, size))
            except Exception as error:
                failure = step_failure(error, self._device)
                if failure is None:
                    raise
            if isinstance(failure, DeviceLost):
                raise failure
            if failure is None:
                captured.insert(0, size)
            elif captured:  # smaller ones would take their own memory as well
                break
        if len(captured) < len(sizes):
            logger.warning(
                "memory is too small for all CUDA graphs: captured %d of %d sizes, up to %d "
                "sequences; other steps are launched kernel by kernel",
                len(captured),
                len(sizes),
                max(captured, default=0),
            )
        self._captured = captured
        report(1.0)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        num_rows = metadata.num_decodes
        index = bisect_left(self._captured, num_rows)
        if num_rows != metadata.num_tokens or index == len(self._captured):
            return self._stack(token_ids, positions, metadata, rows)
        size = self._captured[index]
        self._buffers.fill(size, token_ids, positions, metadata)
        return self._replays[size]()[:num_rows]  # a decode is sampled from: all rows, in order

    def _run(self, size: int) -> Tensor:
        """Returns the final hidden states [size, hidden] of what lies in the buffers."""
        buffers = self._buffers
        x, delta, delta_norm = self._stack.layers(
            buffers.token_ids[:size], buffers.positions[:size], buffers.metadata(size)
        )
        return self._stack.normed(x, delta, delta_norm)


class CudaCapture:
    """Captures functions as CUDA graphs, whose memory is one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Runs `run` twice: the first time kernels are compiled, and cuBLAS allocates what it
        keeps."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which collects garbage each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the stream must not stay in the capture
                    graph.capture_end()
                raise
            graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
