"""The context that vLLM is given: what this project's own engine serves of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.engines.vllm.options import AS_MUCH_AS_FITS, context_args
from worker.model.errors import ModelError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("config", "chosen", "args"),
    [
        ({"max_position_embeddings": 4096}, None, {"max_model_len": AS_MUCH_AS_FITS}),
        ({"max_position_embeddings": 4096}, 4096, {"max_model_len": 4096}),
        ({"model_type": "bloom"}, None, {"max_model_len": AS_MUCH_AS_FITS}),
        ({"model_type": "bloom"}, 512, {"max_model_len": 512}),
        ({"max_position_embeddings": 4096, "rope_scaling": YARN}, None,
         {"max_model_len": AS_MUCH_AS_FITS, "hf_overrides": {"max_position_embeddings": 16384}}),
        ({"text_config": {"max_position_embeddings": 4096, "rope_scaling": YARN}}, 9000,
         {"max_model_len": 9000,
          "hf_overrides": {"text_config": {"max_position_embeddings": 16384}}}),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": LONG}, None, {"max_model_len": 4096}),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
          "rope_scaling": LONG}, 9000, {"max_model_len": 9000}),
    ],
)  # fmt: skip
def test_the_context_is_that_of_the_checkpoint(
    config: dict[str, Any], chosen: int | None, args: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_args(str(tmp_path), chosen) == args


def test_more_than_the_model_has_is_refused_before_vllm_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    with pytest.raises(ModelError, match="PENSTOCK_MAX_MODEL_LEN may be at most that"):
        context_args(str(tmp_path), 4097)
