"""The training network computes what transformers' Qwen3 computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.demo_model.checkpoint import load_network, load_tokenizer, save_checkpoint
from tools.demo_model.network import Network, NetworkConfig

SMALL = NetworkConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network with random weights, norms included, saved as a checkpoint."""
    network = Network(SMALL)
    generator = torch.Generator().manual_seed(5)
    network.init_weights(generator)
    with torch.no_grad():
        for weight in network.parameters():
            weight += torch.randn(weight.shape, generator=generator) * 0.1
    directory = tmp_path_factory.mktemp("network") / "checkpoint"
    save_checkpoint(network, load_tokenizer(), directory)
    return directory


def causal_logits(network: Network, token_ids: torch.Tensor) -> torch.Tensor:
    rows, length = token_ids.shape
    positions = torch.arange(length).expand(rows, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.inference_mode():
        return network.logits(network(token_ids, positions, mask))


def test_logits_equal_those_of_transformers(checkpoint: Path) -> None:
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ours = load_network(checkpoint).float()
    token_ids = torch.randint(0, 4096, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(token_ids).logits
    torch.testing.assert_close(causal_logits(ours, token_ids), expected, atol=2e-5, rtol=1e-4)


def test_a_saved_network_loads_again_as_it_was_in_bfloat16(checkpoint: Path) -> None:
    network = load_network(checkpoint)
    assert network.config == SMALL
    assert {weight.dtype for weight in network.parameters()} == {torch.bfloat16}


def test_init_weights_is_fixed_by_its_generator() -> None:
    one, same = Network(SMALL), Network(SMALL)
    for network in (one, same):
        network.init_weights(torch.Generator().manual_seed(9))
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
