"""Sampler: logits to tokens, every row by its own parameters and independent of the others.

Order: logit bias, penalties, min_tokens' suppression, the grammar, temperature, min-p, top-k,
top-p, then the largest of (score + Gumbel noise), which draws from the softmax exactly (Gumbel
1954; Maddison et al., arXiv:1411.0030). Reported log probabilities are those after bias, penalties,
suppression and grammar and before temperature and filters: what the model thinks, as edited by the
request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shared.messages import SamplingParams, TokenLogprob
from worker.model.device import to_device, to_host
from worker.model.sampling.logits import FilterParams, LogitEdits, PenaltyTable, keep_mask
from worker.model.sampling.row import RowThreads, SamplingRow

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks


# Temperatures below this are greedy to float32 anyway; dividing by them would overflow.
_MIN_TEMPERATURE = 1e-5
# Elements of noise made at once: small enough for a CPU's cache, large enough for a GPU.
_CPU_NOISE_ELEMENTS = 1 << 18
_CUDA_NOISE_ELEMENTS = 1 << 23
_PIECE = 512  # of a row of logits


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows `rows` (in the sampler's batch): the chosen token's and the best ones'."""

    rows: tuple[int, ...]
    num_top: tuple[int, ...]  # how many of the best each row requested
    chosen: Tensor  # [n] float32
    top_ids: Tensor  # [n, k] int64
    top: Tensor  # [n, k] float32

    def to_host(self) -> Logprobs:
        return Logprobs(
            self.rows,
            self.num_top,
            to_host(self.chosen),
            to_host(self.top_ids),
            to_host(self.top),
        )

    def by_row(self, token_ids: Sequence[int]) -> dict[int, TokenLogprob]:
        """Returns the log probabilities by row, impossible tokens left out of the best.

        For the host's copy; `token_ids` are the chosen ones of all rows.
        """
        chosen, top_ids, top = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        result = {}
        for i, row in enumerate(self.rows):
            best = tuple(
                (token_id, value)
                for token_id, value in zip(
                    top_ids[i][: self.num_top[i]], top[i][: self.num_top[i]], strict=True
                )
                if value > -math.inf
            )
            result[row] = TokenLogprob(token_ids[row], chosen[i], best)
        return result


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's choice, on the logits' device."""

    token_ids: Tensor  # [rows] int64, always inside the vocabulary
    best_logits: Tensor  # [rows] not finite where the row has no distribution to draw from
    logprobs: Logprobs | None
    failed: Mapping[int, str] = field(default_factory=dict)  # row -> why nothing was drawn for it

    def to_host(self) -> Sampled:
        """Returns a copy on the host, filled when the stream has come this far."""
        logprobs = self.logprobs.to_host() if self.logprobs is not None else None
        return Sampled(to_host(self.token_ids), to_host(self.best_logits), logprobs, self.failed)


class Sampler:
    """Holds counts for penalties and small device copies per sequence, until `forget`."""

    def __init__(
        self,
        vocab_size: int,
        *,
        max_num_seqs: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        grammar_masks: GrammarMasks | None = None,
        row_threads: RowThreads | None = None,
    ) -> None:
        """Without `grammar_masks` there may be no row with a grammar. `row_threads` draw, each from
        rows of its own; None: the caller alone."""
        self._device = device
        self._row_threads = row_threads or RowThreads(1)
        self._grammar_masks = grammar_masks
        self._edits = LogitEdits(vocab_size, eos_token_ids, device)
        self._penalties = PenaltyTable(vocab_size, max_num_seqs, device)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int64, device=device)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor) -> Sampled:
        """Draws one token for each row of logits [rows, vocab], which stay unchanged.

        `previous` [n] int64 is the step before's sample. Never waits for a CUDA device.
        """
        work = [i for i, row in enumerate(rows) if not row.is_plain_greedy]
        if len(work) == len(rows):
            return self.draw(logits.to(torch.float32, copy=True), rows, previous)
        best_logits, token_ids = best_of_rows(logits)
        if not work:
            return Sampled(token_ids, best_logits, None)
        index = to_device(np.array(work, dtype=np.int64), self._device)
        edited = logits.index_select(0, index).float()
        part = self.draw(edited, [rows[i] for i in work], previous)
        logprobs = part.logprobs
        if logprobs is not None:
            logprobs = replace(logprobs, rows=tuple(work[i] for i in logprobs.rows))
        return Sampled(
            token_ids.index_copy(0, index, part.token_ids),
            best_logits.index_copy(0, index, part.best_logits.to(best_logits.dtype)),
            logprobs,
            {work[i]: why for i, why in part.failed.items()},
        )

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor) -> Sampled:
        """Draws as `sample` from float32 logits [rows, vocab], which are edited in place.

        No row is drawn in a shorter way.
        """
        best_logits = logits.amax(dim=1)
        self._edit(logits, rows, previous)
        failed, best_logits = self._keep_to_grammars(logits, rows, best_logits)
        token_ids = logits.argmax(dim=1)
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            drawn_index = to_device(np.array(drawn, dtype=np.int64), self._device)
            part = logits.index_select(0, drawn_index)
            choice = self._row_threads.map(self._draw, part, [rows[i] for i in drawn])
            token_ids = token_ids.index_copy(0, drawn_index, choice)
        return Sampled(token_ids, best_logits, self._logprobs(logits, token_ids, rows), failed)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees what was kept for these sequences; unknown ones are fine."""
        ids = tuple(seq_ids)
        self._edits.forget(ids)
        self._penalties.forget(ids)
        if self._grammar_masks is not None:
            self._grammar_masks.forget(ids)

    def _edit(self, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor) -> None:
        """Applies biases, penalties and `min_tokens` to `logits` [rows, vocab] float32 in place."""
        for i, row in enumerate(rows):
            self._edits.add_bias(logits[i], row)
        penalised = [i for i, row in enumerate(rows) if row.has_penalties]
        self._penalties.apply(logits, penalised, [rows[i] for i in penalised], previous)
        for i, row in enumerate(rows):
            if row.params.grammar is None:  # which may leave no other token
                self._edits.suppress_stops(logits[i], row)

    def _keep_to_grammars(
        self, logits: Tensor, rows: Sequence[SamplingRow], best_logits: Tensor
    ) -> tuple[dict[int, str], Tensor]:
        """Masks `logits` [rows, vocab] by the grammars; returns failed rows and new `best_logits`.

        `best_logits` [rows] become the best of the tokens that are left: a model may give none of
        them a finite logit.
        """
        structured = {i: row for i, row in enumerate(rows) if row.params.grammar is not None}
        if not structured:
            return {}, best_logits
        assert self._grammar_masks is not None, "jobs with a grammar are refused without masks"
        failed = self._grammar_masks.apply(logits, structured)
        part = to_device(np.array(list(structured), dtype=np.int64), self._device)
        raw = best_logits.index_select(0, part)
        left = logits.index_select(0, part).amax(dim=1)
        worst = torch.where(raw.isfinite(), left, raw)
        return failed, best_logits.index_copy(0, part, worst)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Returns [rows] int64 tokens drawn from logits [rows, vocab]."""
        params = [row.params for row in rows]
        temperatures = [max(p.temperature, _MIN_TEMPERATURE) for p in params]
        divisor = to_device(np.array(temperatures, dtype=np.float32), self._device)
        scores = (logits - logits.amax(dim=1, keepdim=True)) / divisor[:, None]
        keys = [row_key(p.seed or 0, row.position) for p, row in zip(params, rows, strict=True)]
        key_tensor = to_device(np.array(keys, dtype=np.int64), self._device)[:, None]
        vocab_size = scores.shape[1]
        filtered = [
            i
            for i, p in enumerate(params)
            if p.min_p > 0 or p.top_p < 1 or 0 < p.top_k < vocab_size
        ]
        if not filtered:
            return self._argmax_with_noise(scores, key_tensor)
        index = to_device(np.array(filtered, dtype=np.int64), self._device)
        part = scores.index_select(0, index)
        filter_params = self._filter_params([params[i] for i in filtered], vocab_size)
        kept = keep_mask(part, filter_params)
        if scores.is_cuda:  # counting what was kept would wait for the device
            scores = scores.index_copy(0, index, part.masked_fill(~kept, -torch.inf))
            return self._argmax_with_noise(scores, key_tensor)
        chosen = torch.empty(len(rows), dtype=torch.int64)
        chosen[index] = argmax_of_kept(part, kept, key_tensor[index])
        others = sorted(set(range(len(rows))) - set(filtered))
        if others:
            chosen[others] = self._argmax_with_noise(scores[others], key_tensor[others])
        return chosen

    def _filter_params(self, params: Sequence[SamplingParams], vocab_size: int) -> FilterParams:
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        reals = [(p.top_p, math.log(p.min_p) if p.min_p > 0 else -math.inf) for p in params]
        reals_there = to_device(np.array(reals, dtype=np.float32), self._device)
        return FilterParams(
            top_k=to_device(np.array(top_k, dtype=np.int64), self._device),
            top_p=reals_there[:, 0],
            min_log_p=reals_there[:, 1],
            max_top_k=max(top_k),
        )

    def _argmax_with_noise(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Returns [rows] int64 for scores [rows, vocab], keys [rows, 1]; a few rows at a time."""
        limit = _CUDA_NOISE_ELEMENTS if scores.is_cuda else _CPU_NOISE_ELEMENTS
        step = max(1, limit // scores.shape[1])
        parts = [
            (scores[i : i + step] + gumbel(keys[i : i + step], self._token_ids)).argmax(dim=1)
            for i in range(0, scores.shape[0], step)
        ]
        return torch.cat(parts)

    def _logprobs(
        self, edited: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]
    ) -> Logprobs | None:
        """Returns those of the `rows` that request them.

        `edited` are logits [rows, vocab], `chosen` [rows] the tokens.
        """
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not wanted:
            return None
        num_top = tuple(rows[i].params.logprobs or 0 for i in wanted)
        index = to_device(np.array(wanted, dtype=np.int64), self._device)
        part = edited.index_select(0, index)
        norm = part.logsumexp(dim=1, keepdim=True)
        picked = part.gather(1, chosen.index_select(0, index)[:, None]) - norm
        best, best_ids = part.topk(min(max(num_top), part.shape[1]), dim=1)
        return Logprobs(tuple(wanted), num_top, picked[:, 0], best_ids, best - norm)


def best_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest of each row of [rows, vocab] and its first index, as logits.max(dim=1).

    NaN is the largest.
    On the CPU torch takes four times as long with an index as without: there the maximum is
    found piece by piece, and the index in one piece of each row only.
    """
    num_pieces = logits.shape[1] // _PIECE
    if logits.is_cuda or num_pieces < 2:
        return logits.max(dim=1)
    whole = num_pieces * _PIECE
    pieces = logits[:, :whole].view(len(logits), num_pieces, _PIECE)
    best, piece = pieces.amax(dim=2).max(dim=1)
    inside = pieces[torch.arange(len(logits)), piece].max(dim=1).indices
    place = piece * _PIECE + inside
    if whole == logits.shape[1]:
        return best, place
    last, last_place = logits[:, whole:].max(dim=1)
    is_later = (last > best) | (last.isnan() & ~best.isnan())
    return torch.where(is_later, last, best), torch.where(is_later, last_place + whole, place)


def argmax_of_kept(scores: Tensor, kept: Tensor, keys: Tensor) -> Tensor:
    """Returns [rows] int64: the choice among `scores` [rows, vocab], with noise for `kept` alone.

    It is the same as with noise over the whole vocabulary.
    """
    rows, token_ids = kept.nonzero(as_tuple=True)
    noisy = torch.full_like(scores, -torch.inf)
    noisy[rows, token_ids] = scores[rows, token_ids] + gumbel(keys[rows, 0], token_ids)
    return noisy.argmax(dim=1)


# Random numbers without a state: a pure function of (seed, position, token id).
#
# The counter of a SplitMix64 stream (Steele, Lea, Flood 2014) is the token id; the stream's key
# mixes seed and position. The same integers come out on every device and in every batch, so a row
# draws the same token alone and among others, and an interrupted stream continues unchanged.

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Returns the same 64 bits as torch's int64 reads them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: int) -> int:
    value ^= value >> 30
    value = value * _MIX_1 & _MASK
    value ^= value >> 27
    value = value * _MIX_2 & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, position: int) -> int:
    """Returns the key of one row's noise, as a signed 64-bit integer."""
    key = _mix((seed & _MASK) + _STEP & _MASK)
    return _signed(_mix(key + (position + 1) * _STEP & _MASK))


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns 62 random bits, int64 [rows, n], for keys [rows, 1] and token ids [n], int64."""
    x = keys + (token_ids + 1) * _signed(_STEP)  # int64 arithmetic wraps, as the hash wants
    x = x ^ _shift_right(x, 30)
    x = x * _signed(_MIX_1)
    x = x ^ _shift_right(x, 27)
    x = x * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 2)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, finite float32 [rows, n], for int64 keys [rows, 1] and token
    ids [n]; or [n] for n of both.

    The integer is converted whole, so that small uniforms keep all 24 bits of precision: they make
    the large values that win. `log1p` keeps them too, where `log(1 - u)` would be 0. The clamp
    takes away the one u that rounds to 1 and would make a token impossible.
    """
    bits = random_bits(keys, token_ids) | 1
    u = (bits.to(torch.float32) * 2.0**-62).clamp_(max=1.0 - 2.0**-24)
    return torch.log1p(-u).neg_().log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Returns int64 x [...] shifted right without its sign, which torch's own shift keeps."""
    return (x >> count) & ((1 << (64 - count)) - 1)
