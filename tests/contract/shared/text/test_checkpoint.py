"""A checkpoint directory, loaded by us and by transformers: same ids, same text, same prompts.

The reference is the class that takes tokenizer.json as it is; AutoTokenizer rebuilds some families'
tokenizers from its own idea of them, which published checkpoints agree with and tiny ones do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import TextModel
from shared.text.text_model import load_text
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.unit.shared.text.vocabularies import BYTE_FALLBACK, EXACT, SENTENCES, saved

TOKENIZER_KINDS = sorted(set(EXACT) | set(BYTE_FALLBACK))
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt 東京? <|im_end|> 👩‍👩‍👧"},
]


def both(path: Path) -> tuple[TextModel, PreTrainedTokenizerFast]:
    card, blobs = card_from_checkpoint(
        path,
        name="m",
        max_model_len=64,
        kv_capacity_tokens=64,
        dtype="float32",
        num_parameters=1,
    )
    return load_text(card, blobs), PreTrainedTokenizerFast.from_pretrained(path)


def check_text(ours: TextModel, theirs: PreTrainedTokenizerFast) -> None:
    contents = [str(message["content"]) for message in MESSAGES]
    for text in [*SENTENCES, *contents, "", " ", "<tool_call><|im_end|></s>"]:
        for special in (True, False):
            ids = ours.tokenizer.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            decoded = ours.tokenizer.decode(ids, skip_special_tokens=special)
            assert decoded == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_equals_transformers(tmp_path: Path, family: str) -> None:
    ours, theirs = both(make_checkpoint(tmp_path / family, family))
    check_text(ours, theirs)
    assert ours.chat_template is not None
    prompt = ours.chat_template.render(MESSAGES)
    wanted = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert prompt == wanted
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.tokenizer.encode(prompt, add_special_tokens=False) == ids


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_every_kind_of_tokenizer_equals_transformers(
    tmp_path: Path, kind: str, add_bos_token: bool | None
) -> None:
    """The post-processor of tokenizer.json decides; add_bos_token is not asked, here and there."""
    added = {token["content"]: token for token in json.loads(saved(kind))["added_tokens"]}
    bos, eos = list(added)[:2]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "added_tokens_decoder": {
            str(token["id"]): {name: token[name] for name in token if name != "id"}
            for token in added.values()
        },
    }
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token
    (tmp_path / "tokenizer.json").write_bytes(saved(kind))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = both(tmp_path)
    check_text(ours, theirs)
    assert ours.chat_template is not None
    for prompt in (True, False):
        text = ours.chat_template.render(MESSAGES, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=prompt, tokenize=False
        )


@pytest.mark.parametrize("by", ["its flags", "its role", "a list"])
def test_a_checkpoint_may_declare_tokens_special(tmp_path: Path, by: str) -> None:
    added = {token["content"]: token for token in json.loads(saved("byte_level"))["added_tokens"]}
    decoder = {
        str(token["id"]): {name: token[name] for name in token if name != "id"}
        for token in added.values()
    }
    config: dict[str, Any] = {
        "added_tokens_decoder": decoder,
        "eos_token": "<|im_end|>",
        "chat_template": "{{ image_token }}{{ eos_token }}{{ pad_token is defined }}",
    }
    if by == "its flags":
        decoder[str(added["<tool_call>"]["id"])]["special"] = True
    elif by == "its role":
        config["image_token"] = "<tool_call>"
    else:
        config["additional_special_tokens"] = ["<|im_start|>", "x", "<tool_call>"]
    (tmp_path / "tokenizer.json").write_bytes(saved("byte_level"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = both(tmp_path)
    seen = ours.tokenizer.decode(ours.tokenizer.encode("ax<tool_call>b"))
    assert seen == ("a<tool_call>b" if by == "a list" else "axb")
    check_text(ours, theirs)
    assert ours.chat_template is not None
    assert ours.chat_template.render(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False
    )
