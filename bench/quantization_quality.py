"""What int8 and int4 cost: KL divergence and top-1 agreement against the same model in bfloat16.

    python -m bench.quantization_quality [--model DIRECTORY] [--texts 236]
    python -m bench.quantization_quality --model DIRECTORY --prose [--windows 40]

Teacher-forced over the demo model's questions and answers, one JSON line for each tier; `answers`
counts only the places where an answer's token is predicted, which is what a trained model is sure
of. The first line is the bfloat16 native tier against the reference: the noise of rounding.

With `--prose` a real model reads the help topics of Python's documentation, in windows of 512
tokens, through the engine. Each line has a way to compute, its perplexity, and beside float32 the
mean difference of a log probability and how often the best token is the same.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from shared.messages import SamplingParams
from tests.support.forced_logits import forced_logits
from tools.demo_model.checkpoint import CHECKPOINT_DIR
from tools.demo_model.questions import load_facts
from worker.llm import LLM

COMPARED = (("native", "none"), ("native", "int8"), ("packed", "int8"), ("native", "int4"))
TEXTS_AT_ONCE = 16
WINDOW = 512  # tokens
# Options of the LLM; the first is what the others are compared with.
WAYS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int8", "cpu_tier": "packed"},
    {"dtype": "bfloat16", "quantization": "int8", "model_impl": "transformers"},
    {"dtype": "bfloat16", "quantization": "int4"},
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--texts", type=int, default=236)
    parser.add_argument("--prose", action="store_true")
    parser.add_argument("--windows", type=int, default=40)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    if args.prose:
        return read_prose(args.model, tokenizer, args.windows)
    texts, starts = [], []
    for fact in load_facts()[: args.texts]:
        question = f"<|im_start|>user\n{fact.trained[0]}?<|im_end|>\n<|im_start|>assistant\n"
        requested = tokenizer.encode(question).ids
        texts.append(requested + tokenizer.encode(f"{fact.answer}<|im_end|>").ids)
        starts.append(len(requested) - 1)
    for tier, quantization in COMPARED:
        places: dict[str, list[torch.Tensor]] = {"all": [], "answers": []}
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            part = texts[first : first + TEXTS_AT_ONCE]
            expected = forced_logits(args.model, part, tier="reference")
            found = forced_logits(args.model, part, tier=tier, quantization=quantization)
            for i, (p, q) in enumerate(zip(expected, found, strict=True)):
                row = compare(p, q)
                places["all"].append(row)
                places["answers"].append(row[starts[first + i] : -1])
        line: dict[str, object] = {
            "model": args.model.name,
            "tier": tier,
            "quantization": quantization,
            "against": "reference bfloat16",
        }
        for name, rows in places.items():
            kl, agrees = torch.cat(rows).unbind(dim=1)
            line[name] = {
                "tokens": len(kl),
                "kl_mean": round(kl.mean().item(), 6),
                "kl_p99": round(kl.quantile(0.99).item(), 6),
                "top1_agreement": round(agrees.mean().item(), 5),
            }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def read_prose(model: Path, tokenizer: Tokenizer, num_windows: int) -> int:
    topics = pydoc_data.topics.topics
    ids = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))).ids
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(num_windows)]
    windows = [window for window in windows if len(window) == WINDOW]
    expected: torch.Tensor | None = None
    for way in WAYS:
        found = scores(LLM(str(model), max_model_len=WINDOW + 1, **way), windows)
        expected = found if expected is None else expected
        loss, loss_there = -found[:, 0].mean(), -expected[:, 0].mean()
        line = {
            "model": model.name,
            **way,
            "tokens": len(found),
            "perplexity": round(math.exp(loss), 3),
            "more_percent": round(100 * math.expm1(loss - loss_there), 2),
            "mean_difference": round((found - expected)[:, 0].abs().mean().item(), 4),
            "top1_agreement": round((found == expected)[:, 1].float().mean().item(), 4),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


def scores(llm: LLM, windows: list[list[int]]) -> torch.Tensor:
    """[tokens, 2]: the log probability of each token but a window's first, and the likeliest id."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    rows = []
    for result in llm.generate(windows, params, progress=False):
        assert result.prompt_logprobs is not None, result.message
        rows += [(entry.logprob, entry.top[0][0]) for entry in result.prompt_logprobs]
    return torch.tensor(rows, dtype=torch.float64)


def compare(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """[tokens, 2]: KL(expected || found) in nats, and 1 where the likeliest token is the same."""
    p, q = expected.log_softmax(dim=-1), found.log_softmax(dim=-1)
    kl = (p.exp() * (p - q)).sum(dim=-1)
    return torch.stack((kl, (p.argmax(dim=-1) == q.argmax(dim=-1)).float()), dim=1)


if __name__ == "__main__":
    sys.exit(main())
