"""Training: the schedule, and that a few steps learn something and repeat exactly."""

from __future__ import annotations

import torch

from tools.demo_model.checkpoint import load_tokenizer
from tools.demo_model.corpus import Corpus
from tools.demo_model.network import Network, NetworkConfig
from tools.demo_model.questions import load_facts
from tools.demo_model.train import Stage, batch_loss, learning_rate, make_optimizer

SMALL = NetworkConfig(
    hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    stage = Stage(num_steps=1000, peak_learning_rate=2e-3, seed=1)
    rates = [learning_rate(step, stage) for step in range(1000)]
    assert max(rates) == stage.peak_learning_rate
    assert rates[0] < rates[50] < stage.peak_learning_rate
    assert rates[-1] < stage.peak_learning_rate / 1000


def run(num_steps: int) -> list[float]:
    facts = load_facts()[-20:]
    corpus = Corpus(load_tokenizer(), facts, ["Some prose to read."], ["banana"], seed=3)
    network = Network(SMALL)
    network.init_weights(torch.Generator().manual_seed(3))
    optimizer = make_optimizer(network)
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    losses = []
    for _ in range(num_steps):
        loss = batch_loss(network, corpus.batch(2, 128))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_lowers_the_loss_and_repeats_itself() -> None:
    losses = run(20)
    assert losses[-1] < losses[0] - 1.0
    assert run(3) == losses[:3]
