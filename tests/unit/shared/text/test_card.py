from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.messages import InvalidParameter
from shared.text.base import TextInvalid
from shared.text.checkpoint_text import (
    card_from_checkpoint,
    load_tokenizer,
    load_tokenizer_and_eos,
)
from shared.text.model_card import ModelCard, digest_of
from shared.text.text_model import load_text
from tests.unit.shared.text.vocabularies import saved

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write(path: Path, **files: Any) -> Path:
    """A checkpoint's text files; a member `a__json` is the file a.json, None leaves it out."""
    base: dict[str, Any] = {
        "tokenizer__json": saved("byte_level"),
        "config__json": {"vocab_size": 512, "eos_token_id": 5},
        "generation_config__json": {"eos_token_id": [7, 5], "temperature": 0.6, "top_k": 20},
        "tokenizer_config__json": {
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": {"content": "<|endoftext|>", "special": True},
            "model_max_length": 1000,
            "chat_template": CHATML,
        },
    }
    for name, content in (base | files).items():
        if content is None:
            continue
        file = path / name.replace("__", ".").replace("additional", "additional_chat_templates/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def card_of(path: Path) -> tuple[ModelCard, dict[str, bytes]]:
    return card_from_checkpoint(
        path, name="org/model", max_model_len=256, kv_capacity_tokens=1024, dtype="float32",
        num_parameters=12, created_s=1_700_000_000,
    )  # fmt: skip


def test_a_card_holds_the_facts_and_survives_json(tmp_path: Path) -> None:
    card, blobs = card_of(write(tmp_path))
    im_end = load_text(card, blobs).tokenizer.encode("<|im_end|>")
    assert card.vocab_size == 512
    assert card.eos_token_ids == (7, 5, *im_end)
    assert card.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert card.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert card.has_chat_template
    assert set(card.digests) == set(blobs)
    assert all(digest_of(blob) == digest for digest, blob in blobs.items())
    assert ModelCard.from_json(card.to_json()) == card


def test_an_engine_reads_the_end_tokens_of_the_card(tmp_path: Path) -> None:
    path = write(tmp_path)
    tokenizer, ids = load_tokenizer_and_eos(path)
    assert ids == card_of(path)[0].eos_token_ids == (7, 5, tokenizer.token_id("<|im_end|>"))


def test_the_same_checkpoint_gives_the_same_card(tmp_path: Path) -> None:
    assert card_of(write(tmp_path / "a")) == card_of(write(tmp_path / "b"))


def test_a_card_of_a_newer_release_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    card, _ = card_of(write(tmp_path))
    members = json.loads(card.to_json()) | {"member_of_a_newer_release": [1]}
    assert ModelCard.from_json(json.dumps(members).encode()) == card
    for broken in (b"", b"{}", b"[]", json.dumps(members | {"vocab_size": "x"}).encode()):
        with pytest.raises(TextInvalid, match="not a model card"):
            ModelCard.from_json(broken)


def test_a_card_has_the_first_short_suggestions_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def suggestions(listed: object) -> tuple[str, ...]:
        return card_of(write(tmp_path, generation_config__json={"suggestions": listed}))[
            0
        ].suggestions

    assert suggestions(["One?", "Two?"]) == ("One?", "Two?")
    assert suggestions(None) == ()
    assert "ignoring" not in caplog.text
    assert suggestions(["One?", 2, "", "x" * 201, None]) == ("One?",)
    assert suggestions("One?") == ("One?",)
    assert suggestions([str(number) for number in range(100)]) == tuple("01234567")
    assert suggestions({"One?": 1}) == ()
    assert caplog.text.count("ignoring some suggestions of generation_config.json") == 3


def test_text_comes_back_from_the_blobs_alone(tmp_path: Path) -> None:
    card, blobs = card_of(write(tmp_path))
    text = load_text(ModelCard.from_json(card.to_json()), blobs)
    assert text.chat_template is not None
    prompt = text.chat_template.render([{"role": "user", "content": "hé"}])
    assert prompt == "<|im_start|>user\nhé<|im_end|>\n"
    ids = text.tokenizer.encode(prompt)
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert text.tokenizer.decode(ids) == "user\nhé\n"


def test_blobs_are_checked_against_their_digests(tmp_path: Path) -> None:
    card, blobs = card_of(write(tmp_path))
    for digest in card.digests:
        with pytest.raises(TextInvalid, match="missing"):
            load_text(card, {name: blob for name, blob in blobs.items() if name != digest})
        with pytest.raises(TextInvalid, match="damaged"):
            load_text(card, blobs | {digest: blobs[digest] + b" "})


def test_a_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    card, blobs = card_of(write(tmp_path, tokenizer_config__json={"eos_token": "<|im_end|>"}))
    assert not card.has_chat_template
    assert card.template_digest is None
    assert load_text(card, blobs).chat_template is None


def test_a_tokenizer_alone_is_enough(tmp_path: Path) -> None:
    path = write(
        tmp_path, config__json=None, generation_config__json=None, tokenizer_config__json=None
    )
    card, blobs = card_of(path)
    assert card.eos_token_ids == ()
    assert card.vocab_size > 400
    assert load_text(card, blobs).tokenizer.decode([0]) != ""


NO_CONFIG: dict[str, Any] = {"tokenizer_config__json": {}}
LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"chat_template__jinja": "J"}, ("J", "J")),
        ({"chat_template__jinja": "J", "additionaltool_use__jinja": "A"}, ("J", "A")),
        ({"tokenizer_config__json": {"chat_template": "C"}, "chat_template__json": {}}, ("C", "C")),
        ({"tokenizer_config__json": {"chat_template": LISTED}}, ("D", "T")),
        ({"tokenizer_config__json": {}, "chat_template__json": {"chat_template": "P"}}, ("P", "P")),
        (
            {"tokenizer_config__json": {}, "chat_template__json": {"chat_template": LISTED}},
            ("D", "T"),
        ),
    ],
)
def test_templates_are_found_wherever_checkpoints_keep_them(
    tmp_path: Path, files: dict[str, Any], wanted: tuple[str, str]
) -> None:
    template = load_text(*card_of(write(tmp_path, **files))).chat_template
    assert template is not None
    messages = [{"role": "user", "content": "x"}]
    assert (template.render(messages), template.render(messages, tools=[{}])) == wanted


def test_a_file_of_the_operator_replaces_the_checkpoints_templates(tmp_path: Path) -> None:
    path = write(tmp_path / "model", additionalrag__jinja="rag")
    given = tmp_path / "given.jinja"
    given.write_text("given: {{ messages[0].content }}")
    facts: dict[str, Any] = {
        "max_model_len": 8, "kv_capacity_tokens": 8, "dtype": "", "num_parameters": 0
    }  # fmt: skip
    card, blobs = card_from_checkpoint(path, name="m", chat_template=given, **facts)
    template = load_text(card, blobs).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "given: x"
    with pytest.raises(InvalidParameter, match="templates: default"):
        template.render([{"role": "user", "content": "x"}], name="rag")
    with pytest.raises(TextInvalid, match=r"chat template file .*nowhere"):
        card_from_checkpoint(path, name="m", chat_template=tmp_path / "nowhere", **facts)


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token_id": 1}, {}, (1,)),
        # generation_config.json stands for config.json, as in transformers
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": None}, (1, 2)),
        # no model writes what it has no row for
        ({"vocab_size": 9}, {"eos_token_id": [7, 9, 100_000]}, (7,)),
        ({"eos_token_id": None}, {"eos_token_id": [4, 4]}, (4,)),
        ({"text_config": {"eos_token_id": 6, "vocab_size": 9}}, {}, (6,)),
        ({"eos_token_id": "x"}, {"eos_token_id": [-1, True, 1.5]}, ()),
    ],
)
def test_eos_ids_are_those_of_the_generation_config_or_the_config(
    tmp_path: Path, config: Any, generation: Any, wanted: tuple[int, ...]
) -> None:
    path = write(
        tmp_path, config__json=config, generation_config__json=generation, tokenizer_config__json={}
    )
    assert card_of(path)[0].eos_token_ids == wanted


def test_a_special_tokens_map_counts_where_added_tokens_are_not_listed(tmp_path: Path) -> None:
    tokens = {"eos_token": {"content": "<|endoftext|>"}, "image_token": "<tool_call>"}
    card, _ = card_of(write(tmp_path / "old", special_tokens_map__json=tokens))
    assert card.special_tokens["eos_token"] == "<|endoftext|>"
    assert card.special_tokens["image_token"] == "<tool_call>"
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {}}
    path = write(tmp_path / "new", special_tokens_map__json=tokens, tokenizer_config__json=config)
    assert card_of(path)[0].special_tokens == {"eos_token": "<|im_end|>"}


FLAG = "added token 1: 'lstrip' must be true or false"
SURROGATE = r"lone surrogate U\+D800 in the"


def adding(tokens: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer_config__json": {"added_tokens_decoder": tokens}}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"tokenizer__json": None}, r"has no tokenizer\.json"),
        ({"tokenizer__json": b"{}"}, r"tokenizer\.json cannot be used"),
        ({"tokenizer_config__json": b"{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config__json": b"[" * 100_000}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config__json": []}, "is not a JSON object"),
        ({"config__json": b"\xff\xfe\xfd"}, r"config\.json is not JSON"),
        ({"chat_template__jinja": b"\xff"}, "is not UTF-8"),
        ({"chat_template__jinja": "{% if %}"}, "does not compile"),
        ({"chat_template__jinja": "x" * 1_100_000}, "larger than 1048576 bytes"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default"}]}}, "must be text or a"),
        ({"tokenizer_config__json": {"chat_template": [5]}}, "must be text or a"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"1": {}}}}, "has no content"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"x": {"content": "a"}}}},
            "not a number",
        ),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"9999": {"content": "<new>"}}}},
            "do not match",
        ),
        (adding({"9" * 5000: {"content": "a"}}), "not a number"),
        *((adding({"1": {"content": "a", "lstrip": flag}}), FLAG) for flag in (1, "yes", None)),
        *(
            (adding({"1": {"content": "a", flag: None}}), f"'{flag}' must be true or false")
            for flag in ("special", "normalized", "single_word", "rstrip")
        ),
        (adding({"1": {"content": "\ud800"}}), f"{SURROGATE} added tokens"),
        ({"tokenizer_config__json": {"image_token": "\ud800"}}, f"{SURROGATE} special tokens"),
        ({"tokenizer_config__json": {"\ud800_token": "a"}}, f"{SURROGATE} special tokens"),
        (
            {"tokenizer_config__json": {"additional_special_tokens": ["a\ud800"]}},
            f"{SURROGATE} special tokens",
        ),
        ({"tokenizer_config__json": {"chat_template": "\ud800"}}, f"{SURROGATE} chat templates"),
        (
            {"tokenizer_config__json": {}, "chat_template__json": {"chat_template": "\udfff"}},
            r"U\+DFFF in the chat templates",
        ),
    ],
    ids=lambda value: ascii(value)[:100],
)
def test_files_that_cannot_be_used_are_refused_with_a_sentence(
    tmp_path: Path, files: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(TextInvalid, match=sentence):
        card_of(write(tmp_path, **files))


@pytest.mark.parametrize(
    "tokens", [{"1": {"content": "a", "lstrip": 1}}, {"1": {"content": "\ud800"}}], ids=ascii
)
def test_a_tokenizer_alone_is_refused_with_a_sentence_too(
    tmp_path: Path, tokens: dict[str, Any]
) -> None:
    with pytest.raises(TextInvalid, match="added token"):
        load_tokenizer(write(tmp_path, **adding(tokens)))


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextInvalid, match="not a checkpoint directory"):
        card_of(tmp_path / "nowhere")


def test_importing_the_text_room_wakes_no_tensor_stack() -> None:
    program = (
        "import sys, shared.text.model_card, shared.text.detokenizer; "
        "print(sorted({'torch', 'numpy', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
