"""PenstockLogitsProcessor: this project's sampler inside vLLM.

vLLM takes the largest logit of each row (temperature 0). This processor draws the token as
worker.model.sampling does, from the request's own parameters, history and seed, and leaves a row in
which that token is the largest. So a request continues exactly where another engine left it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer
from shared.text.grammar_compiler import GrammarCompiler
from worker.model.sampling.grammar_masks import GrammarMasks
from worker.model.sampling.row import SamplingRow
from worker.model.sampling.sampler import Logprobs, Sampler
from worker.vllm.requests import ANCHOR, SAMPLED, eos_token_ids, from_extra_args


@dataclass(frozen=True, slots=True)
class _Row:
    seq_id: int
    params: SamplingParams
    prompt: list[int]
    known: list[int]  # output tokens of earlier attempts, which vLLM takes for prompt
    output: list[int]  # vLLM's own list, which grows

    def sampling_row(self) -> SamplingRow:
        outputs = self.known + self.output
        return SamplingRow(
            seq_id=self.seq_id,
            params=self.params,
            prompt_token_ids=self.prompt,
            output_token_ids=outputs,
            position=len(self.prompt) + len(outputs),
        )


class PenstockLogitsProcessor(LogitsProcessor):
    """Draws the tokens of all rows whose requests carry parameters of their own."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        model_config = vllm_config.model_config
        eos = eos_token_ids(model_config)
        vocab_size = model_config.get_vocab_size()
        tokenizer = load_tokenizer(Path(model_config.model))
        self._sampler = Sampler(
            vocab_size,
            max_num_seqs=2 * vllm_config.scheduler_config.max_num_seqs,
            eos_token_ids=eos,
            device=device,
            grammar_masks=GrammarMasks(
                GrammarCompiler(tokenizer, vocab_size, sorted(eos)), eos, device
            ),
        )
        self._rows: dict[int, _Row] = {}
        self._next_seq_id = 0
        self._nothing_before = torch.empty(0, dtype=torch.int64, device=device)

    def is_argmax_invariant(self) -> bool:
        """Returns False: the argmax is what it decides."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of vLLM's batch."""
        if batch_update is None:
            return
        gone = [self._rows.pop(index, None) for index in batch_update.removed]
        for index, params, prompt, output in batch_update.added:
            gone.append(self._rows.pop(index, None))
            found = from_extra_args(params.extra_args)
            if found is not None:
                own, num_prompt = found
                self._rows[index] = _Row(
                    self._next_seq_id, own, prompt[:num_prompt], prompt[num_prompt:], output
                )
                self._next_seq_id += 1
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if direction is not MoveDirectionality.SWAP:
                gone.append(replaced)
            elif replaced is not None:
                self._rows[source] = replaced
        self._sampler.forget(row.seq_id for row in gone if row is not None)

    def apply(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, vocab] in which the drawn token of each own row is the largest."""
        places = [i for i in range(logits.shape[0]) if i in self._rows]
        if not places:
            return logits
        rows = [self._rows[i].sampling_row() for i in places]
        index = torch.tensor(places, device=logits.device)
        sampled = self._sampler.sample(logits.index_select(0, index), rows, self._nothing_before)
        forced = torch.full(
            (len(places), logits.shape[1]), -torch.inf, dtype=logits.dtype, device=logits.device
        )
        forced.scatter_(1, sampled.token_ids[:, None], 0.0)
        if sampled.logprobs is not None:
            _write_logprobs(forced, sampled.token_ids, sampled.logprobs)
        return logits.index_copy_(0, index, forced)


def _write_logprobs(forced: Tensor, token_ids: Tensor, logprobs: Logprobs) -> None:
    """Writes into rows of `forced` [rows, vocab] what worker.vllm.requests reads out of them.

    `token_ids` [rows] are the sampled tokens.
    """
    at = torch.tensor(logprobs.rows, device=forced.device)
    chosen = token_ids.index_select(0, at)[:, None]
    part = forced.index_select(0, at)
    part.scatter_(1, logprobs.top_ids, logprobs.top)
    named = torch.cat((logprobs.top_ids, chosen), dim=1)
    # The first token that is none of those that mean something: one of as many as these, and one.
    candidates = torch.arange(named.shape[1] + 1, device=forced.device)
    is_free = (named[:, :, None] != candidates).all(dim=1)
    part.scatter_(1, is_free.int().argmax(dim=1, keepdim=True), ANCHOR)
    part.scatter_(1, chosen, SAMPLED - logprobs.chosen[:, None])
    forced.index_copy_(0, at, part)
