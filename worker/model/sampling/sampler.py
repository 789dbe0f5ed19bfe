"""Sampler: logits to tokens, every row by its own parameters and independent of the others.

Order: logit bias, penalties, min_tokens' suppression, the grammar, temperature, min-p, top-k,
top-p, then the largest of (score + Gumbel noise), which draws from the softmax exactly (Gumbel
1954; Maddison et al., arXiv:1411.0030). Reported log probabilities are those after bias, penalties,
suppression and grammar and before temperature and filters: what the model thinks, as edited by the
request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import TokenLogprob
from worker.model.device import to_device, to_host
from worker.model.sampling.base import DrawKernels
from worker.model.sampling.filters import FilterParams, keep_mask, kept_on_host
from worker.model.sampling.logits import HostPenalties, LogitEdits, PenaltyTable
from worker.model.sampling.noise import HostNoise, gumbel
from worker.model.sampling.plan import BatchPlan, Draws
from worker.model.sampling.row import RowThreads, SamplingRow

if TYPE_CHECKING:
    from worker.model.sampling.grammar_masks import GrammarMasks


log = logging.getLogger(__name__)

_NOISE_ELEMENTS = 1 << 23  # made at once on a device
_PIECE = 512  # of a row of logits


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of the rows `rows` (in the sampler's batch): chosen and best tokens."""

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
        uses_kernels: bool | None = None,
    ) -> None:
        """Without `grammar_masks` there may be no row with a grammar. `row_threads` draw, each from
        rows of its own; None: the caller alone. `uses_kernels`: whether to look for those of
        `DrawKernels`; None: on CUDA."""
        self._device = device
        self._row_threads = row_threads or RowThreads(1)
        self._grammar_masks = grammar_masks
        self._edits = LogitEdits(vocab_size, eos_token_ids, device)
        self._penalties: HostPenalties | PenaltyTable = HostPenalties(vocab_size)
        self._kernels: DrawKernels | None = None
        if uses_kernels is None:
            uses_kernels = device.type == "cuda"
        if device.type == "cuda" or uses_kernels:
            self._penalties = PenaltyTable(vocab_size, max_num_seqs, device)
            if uses_kernels:
                self._kernels = find_kernels(
                    vocab_size, eos_token_ids, device, self._penalties, grammar_masks
                )
        self._vocab_size = vocab_size
        # By whether the first row has a grammar: with lookahead such rows are drawn apart.
        self._plans: dict[bool, BatchPlan] = {}
        if device.type == "cuda":
            self._token_ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
        else:
            self._counters = HostNoise.counters(vocab_size)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor) -> Sampled:
        """Draws one token for each row of logits [rows, vocab], which stay unchanged.

        `previous` [n] int64 is the step before's sample. Never waits for a CUDA device.
        """
        if self._kernels is not None:
            return self._draw_by_kernels(self._kernels, logits, rows, previous)
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

    def wants_best(self, rows: Sequence[SamplingRow]) -> bool:
        """Returns whether every row wants its best token, and nothing else."""
        return self._plan_of(rows).is_plain_greedy

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow], previous: Tensor) -> Sampled:
        """Draws as `sample` from float32 logits [rows, vocab], which are edited in place.

        No row is drawn in a shorter way.
        """
        if self._kernels is not None:
            return self._draw_by_kernels(self._kernels, logits, rows, previous)
        plan = self._plan_of(rows)
        best_logits = logits.amax(dim=1)
        self._edit(logits, rows, plan, previous)
        failed, best_logits = self._keep_to_grammars(logits, rows, plan, best_logits)
        token_ids = self._choose(logits, rows, plan)
        logprobs = None
        if plan.scored:
            scored = logits.index_select(0, self._index(plan.scored))
            logprobs = self._logprobs(scored, token_ids, plan)
        return Sampled(token_ids, best_logits, logprobs, failed)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Frees the state kept for these sequences; unknown ones are ignored."""
        ids = tuple(seq_ids)
        self._edits.forget(ids)
        if self._kernels is not None:
            self._kernels.forget(ids)
        self._penalties.forget(ids)
        if self._grammar_masks is not None:
            self._grammar_masks.forget(ids)

    def forget_all(self) -> None:
        """Frees the counts of all sequences, after a step that raised."""
        self._penalties.forget_all()

    def _plan_of(self, rows: Sequence[SamplingRow]) -> BatchPlan:
        kind = bool(rows) and rows[0].params.grammar is not None
        plan = self._plans.get(kind)
        if plan is None or not plan.is_of(rows):
            plan = self._plans[kind] = BatchPlan.of(rows, self._vocab_size)
        return plan

    def _draw_by_kernels(
        self,
        kernels: DrawKernels,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        previous: Tensor,
    ) -> Sampled:
        plan = self._plan_of(rows)
        chosen = kernels.draw(logits, rows, plan, previous)
        logprobs = None
        if chosen.scored is not None:
            logprobs = self._logprobs(chosen.scored, chosen.token_ids, plan)
        return Sampled(chosen.token_ids, chosen.best_logits, logprobs, chosen.failed)

    def _edit(
        self, logits: Tensor, rows: Sequence[SamplingRow], plan: BatchPlan, previous: Tensor
    ) -> None:
        """Applies biases, penalties and `min_tokens` to `logits` [rows, vocab] float32 in place."""
        for i in plan.biased:
            self._edits.add_bias(logits[i], rows[i])
        self._penalties.apply(logits, plan.penalised, [rows[i] for i in plan.penalised], previous)
        for i in plan.with_minimum:  # a grammar may leave no other token
            self._edits.suppress_stops(logits[i], rows[i])

    def _keep_to_grammars(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        plan: BatchPlan,
        best_logits: Tensor,
    ) -> tuple[dict[int, str], Tensor]:
        """Masks `logits` [rows, vocab] by the grammars; returns failed rows and new `best_logits`.

        `best_logits` [rows] become the best of the tokens that are left: a model may give none of
        them a finite logit.
        """
        if not plan.structured:
            return {}, best_logits
        structured = {i: rows[i] for i in plan.structured}
        assert self._grammar_masks is not None, "jobs with a grammar are refused without masks"
        failed = self._grammar_masks.apply(logits, structured)
        part = to_device(np.array(list(structured), dtype=np.int64), self._device)
        raw = best_logits.index_select(0, part)
        left = logits.index_select(0, part).amax(dim=1)
        worst = torch.where(raw.isfinite(), left, raw)
        return failed, best_logits.index_copy(0, part, worst)

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow], plan: BatchPlan) -> Tensor:
        """Returns [rows] int64 tokens: the best of logits [rows, vocab], or drawn ones."""
        if not plan.drawn:
            return best_of_rows(logits)[1]
        keys = plan.draws.keys([rows[i] for i in plan.drawn])
        if not plan.greedy:
            return self._draw(logits, plan.draws, keys)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        greedy, drawn = self._index(plan.greedy), self._index(plan.drawn)
        token_ids.index_copy_(0, greedy, best_of_rows(logits.index_select(0, greedy))[1])
        part = self._draw(logits.index_select(0, drawn), plan.draws, keys)
        return token_ids.index_copy_(0, drawn, part)

    def _draw(self, logits: Tensor, draws: Draws, keys: NDArray[np.int64]) -> Tensor:
        """Returns [rows] int64 tokens drawn from logits [rows, vocab]; keys [rows]."""
        if not logits.is_cuda:
            places = range(len(keys))
            return self._row_threads.map(
                lambda part, these: self._draw_on_host(part, draws, keys, these), logits, places
            )
        scores = logits - logits.amax(dim=1, keepdim=True)
        scores /= to_device(draws.temperature, self._device)[:, None]
        key_tensor = to_device(keys, self._device)[:, None]
        filtered = np.flatnonzero(draws.is_filtered)
        if len(filtered):
            index = to_device(filtered, self._device)
            part = scores.index_select(0, index)
            kept = keep_mask(part, self._filter_params(draws, filtered))
            scores = scores.index_copy(0, index, part.masked_fill(~kept, -torch.inf))
        return self._argmax_with_noise(scores, key_tensor)

    def _draw_on_host(
        self, logits: Tensor, draws: Draws, keys: NDArray[np.int64], these: range
    ) -> Tensor:
        """Returns tokens [rows] int64 drawn from logits [rows, vocab]: those of the rows `these`.

        One row after the other: what a row needs stays in the core's cache.
        """
        noise = HostNoise(self._counters)
        scores = np.empty(logits.shape[1], dtype=np.float32)
        candidates, values = [], []
        for row, i in zip(logits.numpy(), these, strict=True):
            best = row.max()
            if not np.isfinite(best):  # nothing to draw from: any token will do
                candidates.append(np.zeros(1, dtype=np.int64))
                values.append(np.zeros(1, dtype=np.float32))
                continue
            np.subtract(row, best, out=scores)
            np.divide(scores, draws.temperature[i], out=scores)
            if draws.is_filtered[i]:
                found = kept_on_host(
                    scores, int(draws.top_k[i]), float(draws.top_p[i]), float(draws.min_log_p[i])
                )
            else:
                found = noise.may_win(scores, keys[i])
            candidates.append(found)
            values.append(scores[found])
        lengths = [len(found) for found in candidates]
        token_ids = np.concatenate(candidates)
        row_key = torch.from_numpy(np.repeat(keys[these.start : these.stop], lengths))
        noisy = torch.from_numpy(np.concatenate(values))
        noisy += gumbel(row_key, torch.from_numpy(token_ids))
        ends = np.cumsum(lengths)
        chosen = [
            int(token_ids[end - length : end][noisy[end - length : end].argmax()])
            for end, length in zip(ends, lengths, strict=True)
        ]
        return torch.tensor(chosen, dtype=torch.int64)

    def _filter_params(self, draws: Draws, filtered: NDArray[np.int64]) -> FilterParams:
        top_k = draws.top_k[filtered]
        return FilterParams(
            top_k=to_device(top_k, self._device),
            top_p=to_device(draws.top_p[filtered], self._device),
            min_log_p=to_device(draws.min_log_p[filtered], self._device),
            max_top_k=int(top_k.max()),
        )

    def _argmax_with_noise(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Returns [rows] int64 for scores [rows, vocab], keys [rows, 1]; a few rows at a time."""
        step = max(1, _NOISE_ELEMENTS // scores.shape[1])
        parts = [
            (scores[i : i + step] + gumbel(keys[i : i + step], self._token_ids)).argmax(dim=1)
            for i in range(0, scores.shape[0], step)
        ]
        return torch.cat(parts)

    def _index(self, places: Sequence[int]) -> Tensor:
        return to_device(np.array(places, dtype=np.int64), self._device)

    def _logprobs(self, scored: Tensor, chosen: Tensor, plan: BatchPlan) -> Logprobs:
        """Returns those of the rows that request them: `scored` [scored rows, vocab] are their
        edited logits, `chosen` [rows] the tokens."""
        num_top = tuple(plan.params[i].logprobs or 0 for i in plan.scored)
        tokens = chosen
        if len(plan.scored) < len(plan.params):
            tokens = chosen.index_select(0, self._index(plan.scored))
        norm = scored.logsumexp(dim=1, keepdim=True)
        picked = scored.gather(1, tokens[:, None]) - norm
        best, best_ids = scored.topk(min(max(num_top), scored.shape[1]), dim=1)
        return Logprobs(plan.scored, num_top, picked[:, 0], best_ids, best - norm)


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


def find_kernels(
    vocab_size: int,
    eos_token_ids: frozenset[int],
    device: torch.device,
    penalties: PenaltyTable,
    grammar_masks: GrammarMasks | None,
) -> DrawKernels | None:
    """Returns kernels for the device; None, after saying why, where none can run."""
    # Here and not above, both: they need Triton, which a CPU's build of PyTorch lacks.
    from worker.model.cuda import toolchain

    if reason := toolchain.unavailable_reason(device):
        log.warning(
            "sampling falls back to torch's operators, which cost milliseconds per step: %s", reason
        )
        return None
    from worker.model.sampling.cuda_kernels import SamplingKernels

    return SamplingKernels(vocab_size, eos_token_ids, device, penalties, grammar_masks)
