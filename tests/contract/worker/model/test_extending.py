"""The trials of docs/EXTENDING.md: their lines are run as they are printed there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.checkpoints import make_checkpoint
from tests.support.forced_logits import forced_logits
from worker.model.config.model_config import FAMILIES
from worker.model.tier import ATTENTION_BACKENDS, REFERENCE_OPS

PAGE = Path(__file__).parents[4] / "docs/EXTENDING.md"
TEXTS = [[5, 17, 101, 33, 250, 7, 91], [12, 300, 41, *range(40, 60)]]


def run_trial(name: str) -> None:
    """Runs the block of code behind the mark of that name."""
    (lines,) = re.findall(rf"<!-- trial: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(lines, f"{PAGE.name}: {name}", "exec"), {})


def reference_logits(path: Path, **changes: str) -> list[torch.Tensor]:
    return forced_logits(path, TEXTS, tier="reference", dtype=torch.float32, **changes)


def test_an_attention_backend_takes_a_class_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "one_by_one", ATTENTION_BACKENDS["sdpa"])
    run_trial("attention")
    path = make_checkpoint(tmp_path, "mistral", sliding_window=9)
    calls = 0
    trial = ATTENTION_BACKENDS["one_by_one"]

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return trial(*arguments)  # type: ignore[arg-type]

    monkeypatch.setitem(ATTENTION_BACKENDS, "one_by_one", counted)  # type: ignore[misc]
    found = reference_logits(path, attention="one_by_one")
    assert calls == 1
    for one, expected in zip(found, reference_logits(path), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-3)


def test_a_quantization_takes_a_class_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REFERENCE_OPS, "int4", REFERENCE_OPS["none"])
    run_trial("quantization")
    path = make_checkpoint(tmp_path / "whole", "qwen3")
    rounded = make_checkpoint(tmp_path / "rounded", "qwen3")
    tensors = load_file(rounded / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            scales = weight.abs().amax(dim=1, keepdim=True) / 7
            tensors[name] = (weight / scales).round() * scales
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    plain = reference_logits(path)
    for i, expected in enumerate(reference_logits(rounded)):
        for tier in ("auto", "reference"):  # no faster tier has it
            found = forced_logits(path, TEXTS, tier=tier, dtype=torch.float32, quantization="int4")[
                i
            ]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        assert not torch.allclose(plain[i], expected, rtol=1e-2, atol=1e-2)


def test_an_architecture_takes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "seed_oss", FAMILIES["llama"])  # type: ignore[misc]
    run_trial("architecture")
    config = AutoConfig.for_model(
        "seed_oss",
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_()
    theirs.save_pretrained(tmp_path)
    for text, found in zip(TEXTS, reference_logits(tmp_path), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([text])).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
