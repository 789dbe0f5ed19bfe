"""A checkpoint's sampling defaults: read, checked, overridden, and filled into requests."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from shared.messages import SamplingParams
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, SamplingDefaults, parse_override
from tests.support.checkpoints import make_checkpoint

QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
NOTHING_ASKED: dict[str, Any] = dict.fromkeys(
    ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
)


def card_of(path: Path, generation: dict[str, Any], **members: Any) -> ModelCard:
    make_checkpoint(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **generation}))
    card, _ = card_from_checkpoint(
        path,
        name="m",
        max_model_len=64,
        kv_capacity_tokens=64,
        dtype="float32",
        num_parameters=1,
        **members,
    )
    return card


def test_a_card_has_the_checkpoints_recommended_sampling(tmp_path: Path) -> None:
    generation = {**QWEN3, "do_sample": False, "max_new_tokens": 5, "min_p": None}
    card = card_of(tmp_path, generation)
    assert card.default_sampling == QWEN3  # do_sample changes nothing, as in vLLM
    assert card_of(tmp_path, {}).default_sampling == {}


def test_a_card_can_do_without_and_an_operator_goes_first(tmp_path: Path) -> None:
    none = card_of(tmp_path, QWEN3, generation_config="none")
    assert none.default_sampling == {}
    assert none.eos_token_ids == card_of(tmp_path, QWEN3).eos_token_ids
    override = {"temperature": 0.2, "min_p": 0.1}
    card = card_of(tmp_path, QWEN3, override_generation_config=override)
    assert card.default_sampling == {**QWEN3, **override}
    card = card_of(tmp_path, QWEN3, generation_config="none", override_generation_config=override)
    assert card.default_sampling == override


def test_values_that_no_request_may_have_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"temperature": 7, "top_k": 2.5, "top_p": "0.9", "min_p": True, "repetition_penalty": 0}
    with caplog.at_level(logging.WARNING):
        assert card_of(tmp_path, bad).default_sampling == {}
    output = {record.__dict__["member"] for record in caplog.records if "member" in record.__dict__}
    assert output == set(bad)


def test_a_frontend_checks_the_values_of_another_releases_card() -> None:
    output = {"temperature": 0.6, "top_k": 20.0, "top_p": 1.5, "typical_p": 0.9, "min_p": -1.0}
    values = SamplingDefaults.of(output).values
    assert values == {"temperature": 0.6, "top_k": 20}
    assert isinstance(values["top_k"], int)
    assert SamplingDefaults.of({"top_k": -1}).values == {"top_k": 0}
    assert SamplingDefaults.of({"temperature": float("nan")}).values == {}


def test_a_card_without_the_member_is_neutral(tmp_path: Path) -> None:
    members = json.loads(card_of(tmp_path, QWEN3).to_json())
    del members["default_sampling"]
    card = ModelCard.from_json(json.dumps(members).encode())
    defaults = SamplingDefaults.of(card.default_sampling)
    assert SamplingParams(**defaults.fill(NOTHING_ASKED)) == SamplingParams()
    filled = defaults.fill(NOTHING_ASKED, neutral_temperature=0.0)
    assert SamplingParams(**filled) == SamplingParams(temperature=0.0)


def test_a_request_overrides_the_defaults() -> None:
    defaults = SamplingDefaults.of({**QWEN3, "repetition_penalty": 1.1})
    requested = {**NOTHING_ASKED, "temperature": 0.0, "top_k": 0}
    assert defaults.fill(requested) == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
    }
    assert defaults.fill(NOTHING_ASKED, neutral_temperature=0.0)["temperature"] == 0.6


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("{", "JSON"),
        ("[" * 2000, "JSON"),
        ("[1]", "object"),
        ('{"max_tokens": 5}', "max_tokens"),
        ('{"temperature": 3}', "temperature"),
        ('{"temperature": null}', "temperature"),
        ('{"top_k": "20"}', "top_k"),
        (" " + "9" * 5000, "characters"),
    ],
)
def test_an_override_that_cannot_be_used_is_a_sentence(text: str, output: str) -> None:
    with pytest.raises(ValueError, match=output):
        parse_override(text)


def test_an_override_is_a_json_object() -> None:
    assert parse_override(" ") == {}
    assert parse_override('{"temperature": 0.6, "top_k": -1}') == {"temperature": 0.6, "top_k": 0}
