"""The context that a config.json gives, in the spellings of checkpoints that people serve."""

from __future__ import annotations

from typing import Any

import pytest

from worker.model.config.context_length import ContextLength
from worker.model.errors import UnsupportedModel

FULL = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "default", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096, 4096),
        ({"n_positions": 1024}, 1024, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072, 131072),
        # linear multiplies what is there, llama3 and gemma 3 have it multiplied already
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}},
         16384, 16384),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
          "original_max_position_embeddings": 8192}}, 131072, 131072),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072,
          "rope_parameters": {"sliding_attention": FULL, "full_attention": LINEAR}},
         131072, 131072),
        ({"model_type": "other", "max_position_embeddings": 1000,
          "rope_parameters": {"sliding_attention": FULL, "full_attention": LINEAR}}, 8000, 8000),
        # yarn: by its own members, or already multiplied
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
          "original_max_position_embeddings": 32768}}, 131072, 131072),
        ({"max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40,
          "original_max_position_embeddings": 4096}}, 163840, 163840),
        # frequencies that depend on the length: the plain ones unless MAX_MODEL_LEN says more
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
         4096, 8192),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
         4096, 131072),
        # of a multimodal model the language model's
        ({"model_type": "gemma3", "max_position_embeddings": 64,
          "text_config": {"max_position_embeddings": 32768}}, 32768, 32768),
    ],
)  # fmt: skip
def test_the_context_of_a_config(config: dict[str, Any], default: int, longest: int) -> None:
    found = ContextLength.of(config)
    assert found is not None
    assert (found.default, found.longest) == (default, longest)
    assert found.by_yarn == (default == 4 * 32768 and config["max_position_embeddings"] == 40960)


def test_a_config_without_positions_has_no_context_length() -> None:
    assert ContextLength.of({"model_type": "bloom"}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_position_embeddings": "4096"}, "max_position_embeddings must be"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be"),
        ({"n_positions": 8, "rope_scaling": {"type": "linear", "factor": -1}}, "factor must be"),
        ({"n_positions": 8, "rope_scaling": ["linear"]}, "rope_scaling must be an object"),
    ],
)
def test_members_that_cannot_be_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ContextLength.of(config)
