"""What each rank has of a model: together everything, once, and as much as the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.checkpoints import make_checkpoint
from worker.model.config.model_config import ModelConfig
from worker.model.errors import UnsupportedModel
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement, RankGroup
from worker.model.parallel.plan import check_divisible, rank_config
from worker.model.weights.loader import Checkpoint


def rank_model(path: Path, rank: int, size: int) -> CausalLM:
    """The model of one rank, loaded; nothing of it is computed, so no other rank is needed."""
    placement = Placement(torch.device("cpu"), torch.float32, RankGroup(rank, size))
    model = CausalLM(ModelConfig.from_directory(path), 32, placement)
    Checkpoint(path, model.config).load(model)
    return model


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_together_have_the_checkpoint(family: str, size: int, tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, family, num_attention_heads=4, num_key_value_heads=2, vocab_size=385
    )
    on_disk = load_file(path / "model.safetensors")
    seen = {name: torch.zeros_like(tensor, dtype=torch.int32) for name, tensor in on_disk.items()}
    counts = []
    for rank in range(size):
        model = rank_model(path, rank, size)
        assert model.num_parameters == sum(tensor.numel() for tensor in on_disk.values())
        places = [place for _, place in model.named_tensors()]
        counts.append(sum(place.data.numel() for place in places if place.data is not None))
        for name, place in model.named_tensors():
            if place.data is None:
                continue
            part = (place.rows, *([place.columns] if place.columns else []))
            where = tuple(slice(share.start, share.stop) for share in part)
            assert torch.equal(place.data, on_disk[name][where].float()), name
            seen[name][where] += 1
    for name, times in seen.items():
        is_copied = name.endswith("norm.weight") or (
            size == 4 and (".k_proj." in name or ".v_proj." in name)
        )
        assert times.min() >= 1, name
        if not is_copied:
            assert times.max() == 1, name
    whole = model.num_parameters
    assert max(counts) < 1.3 * whole / size + 1000, "a rank's memory is its part of the whole"


def test_a_rank_caches_its_own_key_heads(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", num_attention_heads=4, num_key_value_heads=2)
    config = ModelConfig.from_directory(path)
    assert [rank_config(config, RankGroup(r, 2)).num_kv_heads for r in range(2)] == [1, 1]
    assert [RankGroup(r, 4).kv_heads(2).start for r in range(4)] == [0, 0, 1, 1]
    assert [RankGroup(r, 4).heads(4).start for r in range(4)] == [0, 1, 2, 3]


def test_a_size_that_does_not_divide_is_refused_with_those_that_do(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(
        make_checkpoint(tmp_path, "llama", num_attention_heads=4, num_key_value_heads=2)
    )
    with pytest.raises(
        UnsupportedModel, match=r"PENSTOCK_TENSOR_PARALLEL_SIZE=3 .*possible sizes: 1, 2, 4$"
    ):
        check_divisible(config, 3)
    check_divisible(config, 4)
    with pytest.raises(UnsupportedModel, match="intermediate_size 129"):
        check_divisible(replace(config, intermediate_size=129), 2)
