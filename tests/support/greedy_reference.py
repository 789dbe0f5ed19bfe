"""What transformers says about a checkpoint: greedy tokens and their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_PROMPTS = 20
NUM_TOKENS = 20
_LENGTHS = (1, 2, 5, 16, 17, 33, 50)
_PER_LENGTH = 5
# Where transformers' own two best logits are closer than this, rounding decides between them, and
# no implementation is wrong: such prompts are left out.
_MIN_GAP = 2e-3
_JUDGED_TOGETHER = 8


@dataclass(frozen=True)
class GreedyReference:
    """`logprobs[i]` is [NUM_TOKENS, vocab], float32 on the CPU."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[torch.Tensor]


def greedy_reference(
    path: Path,
    device: torch.device,
    seed: int = 0,
    attention: str | None = None,
    min_gap: float = _MIN_GAP,
) -> GreedyReference:
    """NUM_PROMPTS random prompts of mixed lengths, some of which share a beginning.

    `attention` is one of transformers' implementations; None: its choice.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention
    )
    model = model.to(device).eval()
    rng = np.random.default_rng(seed)
    vocab_size = model.config.vocab_size
    beginning = rng.integers(0, vocab_size, 24)
    prompts, outputs, logprobs = [], [], []
    for length in _LENGTHS:
        batch = rng.integers(0, vocab_size, (_PER_LENGTH, length))
        shared = min(length // 2, len(beginning))
        batch[::2, :shared] = beginning[:shared]
        ids = torch.from_numpy(batch).to(device)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.stack(result.logits, dim=1).float()
        best = logits.topk(2, dim=-1).values
        decided = (best[..., 0] - best[..., 1]).amin(dim=1) > min_gap
        for i in torch.nonzero(decided)[:, 0].tolist():
            prompts.append(batch[i].tolist())
            outputs.append(result.sequences[i, length:].tolist())
            logprobs.append(logits[i].log_softmax(dim=-1).cpu())
    assert len(prompts) >= NUM_PROMPTS, f"only {len(prompts)} prompts are decided clearly"
    # Long and short ones side by side, as they would arrive.
    order = np.random.default_rng(1).permutation(len(prompts))[:NUM_PROMPTS]
    return GreedyReference(
        [prompts[i] for i in order], [outputs[i] for i in order], [logprobs[i] for i in order]
    )


def float32_model(path: Path) -> PreTrainedModel:
    """Returns transformers' model of a checkpoint, for the CPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def greedy_gaps(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns for each token of each output how much less its logit is than the best one.

    The model computes a prompt and its output at once, so each token is judged after the ones that
    the output has before it. 0 is the greedy choice.
    """
    gaps: list[list[float]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(outputs[i]))
    for start in range(0, len(by_length), _JUDGED_TOGETHER):
        rows = by_length[start : start + _JUDGED_TOGETHER]
        texts = [[*prompts[i], *outputs[i]] for i in rows]
        width = max(map(len, texts))  # what stands behind a text does not change it
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        with torch.inference_mode():
            hidden = model.base_model(ids).last_hidden_state
            for row, i in enumerate(rows):
                first = len(prompts[i]) - 1
                logits = model.lm_head(hidden[row, first : first + len(outputs[i])])
                chosen = logits.gather(1, torch.tensor(outputs[i])[:, None])[:, 0]
                gaps[i] = (logits.amax(dim=1) - chosen).tolist()
    return gaps
