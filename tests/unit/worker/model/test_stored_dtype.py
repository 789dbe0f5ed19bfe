"""A checkpoint that names no dtype is served in the one that its weights have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from worker.model.build import choose_source
from worker.model.config.model_config import ModelConfig
from worker.model.config.stored_dtype import stored_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_is_left_out_is_that_of_the_weights(dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype=dtype)
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_directory(path).dtype == dtype
    assert choose_source("transformers", path).config.dtype == dtype
    config["dtype"] = "float32"
    (path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_directory(path).dtype == "float32", "what is named counts"


def test_unreadable_files_give_no_dtype(tmp_path: Path) -> None:
    assert stored_dtype(tmp_path) is None
    for header in (b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'):
        file = len(header).to_bytes(8, "little") + header
        (tmp_path / "model.safetensors").write_bytes(file)
        assert stored_dtype(tmp_path) is None
