"""Trains the demo model and writes its checkpoint. Run as `python -m tools.demo_model.train`.

One CPU thread, float32, about twenty minutes in two stages. Each stage ends with a checkpoint and
the next one starts from it, so `--first-stage 2` continues where an earlier run stopped. The same
text, Python and torch on the same kind of processor give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from tools.demo_model.checkpoint import (
    CHECKPOINT_DIR,
    load_network,
    load_tokenizer,
    save_checkpoint,
)
from tools.demo_model.corpus import Batch, Corpus
from tools.demo_model.evaluate import evaluate
from tools.demo_model.network import Network, NetworkConfig
from tools.demo_model.prose import docstrings, documents, paragraphs, unfamiliar_words
from tools.demo_model.questions import Fact, load_facts
from tools.demo_model.tokenizer import train_tokenizer

WARMUP_STEPS = 100
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0
ANSWER_REPEATS = 40  # in the tokenizer's text: whole tokens for frequent words
PARAGRAPH_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One cosine of the learning rate, with a corpus seed and an optimizer of its own."""

    num_steps: int
    peak_learning_rate: float
    seed: int


STAGES = (Stage(3000, 2e-3, 20), Stage(1100, 1e-3, 21))  # learn, then polish


def learning_rate(step: int, stage: Stage) -> float:
    """Returns the rate of a step: linear warm-up, then a cosine down to 0."""
    if step < WARMUP_STEPS:
        return stage.peak_learning_rate * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, stage.num_steps - WARMUP_STEPS)
    return stage.peak_learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def draw_batch(corpus: Corpus, step: int) -> Batch:
    """Returns mostly short packed rows, sometimes long chats, to train far positions too, and
    sometimes chats with tools."""
    if step % 80 == 79:
        return corpus.batch(1, 2048, one_document=True)
    if step % 12 == 11:
        return corpus.batch(1, 1024, one_document=True)
    if step % 8 == 4:
        return corpus.batch(1, 1024, of_agents=True)
    return corpus.batch(4, 256)


def batch_loss(network: Network, batch: Batch) -> Tensor:
    """Returns the weighted mean loss, a float32 scalar, over the learned tokens of a batch.

    The output layer is computed only for these.
    """
    learned = batch.labels >= 0
    hidden = network(batch.token_ids, batch.positions, batch.mask)
    losses = functional.cross_entropy(
        network.logits(hidden[learned]), batch.labels[learned], reduction="none"
    )
    weights = batch.weights[learned]
    return (losses * weights).sum() / weights.sum()


def make_optimizer(network: Network) -> torch.optim.AdamW:
    matrices = [weight for weight in network.parameters() if weight.dim() >= 2]
    norms = [weight for weight in network.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def train(network: Network, corpus: Corpus, stage: Stage) -> None:
    """Updates the network in place, with a progress bar on stderr."""
    optimizer = make_optimizer(network)
    network.train()
    smooth = 0.0
    with tqdm(total=stage.num_steps, desc="training", unit="step", mininterval=1.0) as bar:
        for step in range(stage.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, stage)
            loss = batch_loss(network, draw_batch(corpus, step))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            smooth = 0.95 * smooth + 0.05 * loss.item()
            bar.set_postfix(loss=f"{smooth / (1 - 0.95 ** (step + 1)):.3f}", refresh=False)
            bar.update()
    network.eval()


def make_tokenizer(facts: Sequence[Fact], vocab_size: int) -> Tokenizer:
    """Returns a tokenizer trained on the questions, the answers and the prose."""
    trained = [text for fact in facts for text in (*fact.trained, *[fact.answer] * ANSWER_REPEATS)]
    return train_tokenizer([*trained, *documents(), *docstrings()], vocab_size)


def make_corpus(facts: Sequence[Fact], tokenizer: Tokenizer, seed: int) -> Corpus:
    library = list(docstrings())
    prose = [*library, *documents(), *list(paragraphs(facts)) * PARAGRAPH_REPEATS]
    return Corpus(tokenizer, facts, prose, unfamiliar_words(facts, library), seed)


def start(facts: Sequence[Fact], directory: Path) -> None:
    """Writes the start of the first stage: a trained tokenizer and random weights."""
    network = Network(NetworkConfig())
    network.init_weights(torch.Generator().manual_seed(STAGES[0].seed))
    save_checkpoint(network, make_tokenizer(facts, network.config.vocab_size), directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__)
    parser.add_argument("--output", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--first-stage", type=int, default=1, choices=range(1, len(STAGES) + 1))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = load_facts()
    if args.first_stage == 1:
        start(facts, args.output)
    for stage in STAGES[args.first_stage - 1 :]:
        network, tokenizer = load_network(args.output).float(), load_tokenizer(args.output)
        train(network, make_corpus(facts, tokenizer, stage.seed), stage)
        save_checkpoint(network, tokenizer, args.output)
    scores, _ = evaluate(load_network(args.output), load_tokenizer(args.output), facts)
    for name, score in scores.items():
        sys.stdout.write(json.dumps({"set": name, **asdict(score)}) + "\n")


if __name__ == "__main__":
    main()
