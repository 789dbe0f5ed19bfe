"""What a worker finds out about its model when the engine is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from worker.checkpoint import Checkpoint, LoadedModel, TextFiles
from worker.engine.config import EngineConfig
from worker.runtime.messages import EngineReady
from worker.settings import WorkerSettings

BLOCK_SIZE = 16


def loaded(path: Path, num_blocks: int, max_model_len: int, **settings: object) -> LoadedModel:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        max_waiting=4,
    )
    ready = EngineReady(
        config=config, vocab_size=384, num_parameters=1, dtype="float32", load_s=0.0, stats={}
    )
    given = WorkerSettings(redis_url="redis://nowhere", model=str(path), **settings)
    return LoadedModel.of(TextFiles.read(Checkpoint(path, "m"), given), ready)


def test_a_model_as_it_is_has_no_shortcoming(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(tmp_path), num_blocks=64, max_model_len=512)
    assert model.shortcomings() == []
    assert (model.card.context_length, model.card.max_model_len) == (512, 512)


def test_a_context_that_memory_shortens_is_named_with_what_changes_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    model = loaded(path, num_blocks=10, max_model_len=160)
    (sentence,) = model.shortcomings()
    assert "160 tokens instead of the model's 512" in sentence
    for setting in ("KV_CACHE_MEMORY_GB", "NUM_KV_BLOCKS", "MAX_MODEL_LEN"):
        assert setting in sentence
    assert (model.card.context_length, model.card.max_model_len) == (512, 160)


def test_a_context_that_the_operator_chose_is_no_shortcoming(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    assert loaded(path, num_blocks=64, max_model_len=160).shortcomings() == []


@pytest.mark.parametrize("has_file", [False, True])
def test_a_missing_chat_template_is_named_unless_the_operator_gives_one(
    tmp_path: Path, has_file: bool
) -> None:
    path = make_checkpoint(tmp_path / "model", chat_template=None)
    file = tmp_path / "given.jinja"
    file.write_text("{{ messages[0].content }}")
    settings = {"chat_template": file} if has_file else {}
    model = loaded(path, num_blocks=64, max_model_len=512, **settings)
    assert model.card.has_chat_template is has_file
    assert ["CHAT_TEMPLATE" in sentence for sentence in model.shortcomings()] == (
        [] if has_file else [True]
    )
