"""TransformersModel and its DecoderStack: a model of transformers as the runner knows models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.messages import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledSequence
from worker.engines.transformers.attention import AttentionMismatch, PagedAttention
from worker.engines.transformers.config import SERVED_ELSEWHERE, TransformersConfig, in_one_line
from worker.model.base import AttentionMetadata, RunInto
from worker.model.cpu.library import NativeKernels
from worker.model.device import is_out_of_memory, step_failure
from worker.model.errors import UnsupportedModel
from worker.model.kv_cache import KVCachePool
from worker.model.parallel.group import Placement
from worker.model.sampling.base import PreviousSample
from worker.model.step.forward_batch import ForwardBatch, KeptBatch

# Difference of logits from those of the model's own attention. Faults are far larger: a layer
# without its window, a state that was lost between two chunks.
_EXACT_TOLERANCE = 1e-3  # in float32
_TOLERANCE = 0.15
_CHECKED_TOKENS = 24


class TransformersModel:
    """A ServedModel. Its stack returns logits: what comes after the last layer, such as a scale or
    a soft cap, is the model's own."""

    def __init__(
        self,
        config: TransformersConfig,
        model: PreTrainedModel,
        attention: PagedAttention,
        placement: Placement,
    ) -> None:
        self.config = config
        self.placement = placement
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.network = model
        self.attention = attention

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class TransformersStack:
    """A DecoderStack, from token ids to logits [N, vocab]."""

    def __init__(
        self,
        model: TransformersModel,
        pool: KVCachePool,
        kernels: NativeKernels | None = None,
        uses_triton: bool = False,
    ) -> None:
        """`kernels` compute the attention where they can, or those in Triton."""
        self._network = model.network
        self._attention = model.attention
        self._attention.use(pool, kernels, uses_triton)
        self.hidden_size = model.config.vocab_size
        self.dtype = model.placement.dtype
        self.run_gemv_into: RunInto | None = None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, rows: Tensor
    ) -> Tensor:
        self._attention.begin(metadata)
        rows = rows.long()
        logits = logits_of(self._network, token_ids, positions, rows)
        self._attention.end()
        self.dtype = logits.dtype  # some models compute them wider
        return logits if len(logits) == len(rows) else logits.index_select(0, rows)

    def run_into(
        self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, out: Tensor
    ) -> None:
        """Computes the logits [num_tokens, vocab] of all tokens, in `out`."""
        self._attention.begin(metadata)
        out.copy_(logits_of(self._network, token_ids, positions))
        self._attention.end()


def logits_of(
    network: PreTrainedModel, token_ids: Tensor, positions: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Returns the logits [N, vocab] of `rows` [N], or of all tokens, of a flat batch without a
    cache of its own. Some models compute those of all tokens whatever they are given."""
    output = network(
        input_ids=token_ids[None].long(),
        position_ids=positions[None].long(),
        use_cache=False,
        logits_to_keep=0 if rows is None else rows,
        return_dict=True,
    )
    logits: Tensor = output.logits[0]
    return logits


@torch.inference_mode()
def check_attention(model: TransformersModel, stack: TransformersStack, pool: KVCachePool) -> None:
    """Raises UnsupportedModel unless two short texts, computed side by side in chunks over the
    pool, have the logits of the model's own attention over each alone.

    Writes into the first blocks of `pool`, which hold nothing yet.
    """
    generator = torch.Generator().manual_seed(0)
    texts: list[list[int]] = [
        torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
        for length in _lengths(model, pool)
    ]
    found: dict[tuple[int, int], Tensor] = {}  # by text and position
    with _refused(model):
        for parts in _steps([len(text) for text in texts]):
            logits = _run(stack, pool, texts, parts, model.config.vocab_size)
            found |= {(row, end - 1): logits[i] for i, (row, _, end) in enumerate(parts)}
        result = torch.stack(list(found.values()))
        expected = torch.stack([_alone(model, texts[row], place)[-1] for row, place in found])
    is_off, off = compare(model, result, expected)
    if is_off:
        raise UnsupportedModel(
            f"model_type {model.config.model_type!r} does not give over a paged KV cache what it "
            f"gives alone: logits are off by {off:.1%}; {SERVED_ELSEWHERE}"
        )


@torch.inference_mode()
def logits_alone(model: TransformersModel) -> Tensor:
    """Returns the logits [tokens, vocab] of two short texts, by the model's own attention.

    Raises UnsupportedModel where its forward pass fails.
    """
    generator = torch.Generator().manual_seed(1)
    longest = min(_CHECKED_TOKENS, model.config.context_length)
    with _refused(model):
        texts: list[list[int]] = [
            torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
            for length in (longest, -(-longest // 2))
        ]
        return torch.cat([_alone(model, text, len(text) - 1) for text in texts])


def compare(model: TransformersModel, result: Tensor, expected: Tensor) -> tuple[bool, float]:
    """Returns whether logits [rows, vocab] differ by more than rounding, and by what share."""
    wide = expected.float()
    rows_off = (result.float() - wide).norm(dim=1) / wide.norm(dim=1)
    is_exact = model.placement.dtype is torch.float32
    # Rounded more coarsely, a token may change its expert.
    off = (rows_off.max() if is_exact else rows_off.median()).item()
    return not off <= (_EXACT_TOLERANCE if is_exact else _TOLERANCE), off


@contextlib.contextmanager
def _refused(model: TransformersModel) -> Iterator[None]:
    """Raises UnsupportedModel for what fails in the model's own code."""
    try:
        yield
    except AttentionMismatch as error:
        raise UnsupportedModel(
            f"model_type {model.config.model_type!r} does not call its attention alike in every "
            f"pass ({error}); {SERVED_ELSEWHERE}"
        ) from error
    except Exception as error:  # of many kinds: each model's code is its own
        if is_out_of_memory(error):
            raise  # of the machine, not of the model
        if failure := step_failure(error, model.placement.device):
            raise failure from error
        raise UnsupportedModel(
            f"model_type {model.config.model_type!r} fails in its own forward pass "
            f"({type(error).__name__}: {in_one_line(error)}); {SERVED_ELSEWHERE}"
        ) from error


def _lengths(model: TransformersModel, pool: KVCachePool) -> list[int]:
    """Returns the lengths of the texts: of one, where the pool has a single block."""
    count = min(2, pool.num_blocks)
    places = pool.num_blocks // count // len(pool.groups.windows) * pool.block_size
    longest = min(_CHECKED_TOKENS, model.config.context_length, places)
    return [longest, -(-2 * longest // 3)][:count]


def _steps(lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Returns steps of (text, start, end): chunks and single tokens, these first in a step."""
    cuts = []
    for row, length in enumerate(lengths):
        ends = (
            (1, length // 2, length - 1, length) if row == 0 else (length // 3, length - 1, length)
        )
        cuts.append([0, *ends, length])
    steps = []
    for step in range(4):
        parts = [
            (row, ends[step], ends[step + 1])
            for row, ends in enumerate(cuts)
            if ends[step] < ends[step + 1]
        ]
        if parts:
            steps.append(sorted(parts, key=lambda part: part[2] - part[1] > 1))
    return steps


def _run(
    stack: TransformersStack,
    pool: KVCachePool,
    texts: list[list[int]],
    parts: list[tuple[int, int, int]],
    vocab_size: int,
) -> Tensor:
    """Returns the logits of the last token of each part, [parts, vocab]."""
    share = pool.num_blocks // len(texts)  # blocks of each text
    num_groups, device = len(pool.groups.windows), pool.storage.device
    sequences = tuple(
        ScheduledSequence(
            seq_id=row,
            start=start,
            num_scheduled_tokens=end - start,
            token_ids=texts[row][start:end],
            block_table=range(row * share, row * share + -(-end // pool.block_size) * num_groups),
            samples=True,
            params=SamplingParams(),
            prompt_token_ids=texts[row],
            output_token_ids=(),
        )
        for row, start, end in parts
    )
    batch = ForwardBatch.build(
        ScheduledBatch(sequences),
        block_size=pool.block_size,
        vocab_size=vocab_size,
        device=device,
        previous=PreviousSample(torch.empty(0, dtype=torch.int64, device=device), {}),
        kept=KeptBatch(len(parts), pool.block_size, vocab_size, device, num_groups),
    )
    return stack(batch.input_ids, batch.positions, batch.metadata, batch.logits_rows)


def _alone(model: TransformersModel, text: list[int], place: int) -> Tensor:
    """Returns the logits [tokens, vocab] up to the token at `place`, by the model's own
    attention."""
    device = model.placement.device
    ids = torch.tensor(text[: place + 1], dtype=torch.int32, device=device)
    positions = torch.arange(place + 1, dtype=torch.int32, device=device)
    with model.attention.away(model.network):
        return logits_of(model.network, ids, positions, positions.long())
