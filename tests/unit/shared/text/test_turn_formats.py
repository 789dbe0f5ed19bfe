"""What a chat template shows of the formats of its model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shared.text.base import TextInvalid
from shared.text.chat_template import JinjaChatTemplate
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, digest_of
from shared.text.template_formats import find_reasoning_format, find_tool_format, shows_tools
from shared.text.text_model import load_text
from shared.text.tool_formats import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)
from tests.contract.shared.text import templates
from tests.support.checkpoints import CHATML_TEMPLATE, make_checkpoint
from tests.support.tool_models import HERMES_TEMPLATE, LLAMA3_TEMPLATE, MARKERS
from tests.support.tool_templates import FAMILIES


def found(source: str) -> tuple[bool, ToolFormat | None, ReasoningFormat | None]:
    template = JinjaChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return shows_tools(template), find_tool_format(template), find_reasoning_format({"": source})


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (HERMES_TEMPLATE, (True, ToolFormat.HERMES, ReasoningFormat.THINK)),
        (LLAMA3_TEMPLATE, (True, ToolFormat.LLAMA3_JSON, None)),
        (templates.QWEN25_TOOLS, (True, ToolFormat.HERMES, None)),
        (templates.HERMES_TOOLS, (True, ToolFormat.HERMES, None)),
        (templates.LLAMA31_TOOLS, (True, ToolFormat.LLAMA3_JSON, None)),
        (templates.QWEN3_THINKING, (False, None, ReasoningFormat.THINK)),
        (templates.DEEPSEEK_R1, (False, None, ReasoningFormat.THINK)),
        (templates.MISTRAL_V3_TOOLS, (True, ToolFormat.MISTRAL, None)),
        (templates.GRANITE, (True, ToolFormat.GRANITE, None)),
        *(
            (family.template, (True, family.tool_format, family.reasoning_format))
            for family in FAMILIES.values()
        ),
        # Tools in a format that is not known here.
        (templates.COMMAND_R_TOOLS, (True, ToolFormat.TEXT, None)),
        (templates.CHATML, (False, None, None)),
        (templates.LLAMA3, (False, None, None)),
        ("{{ raise_exception('no') }}", (False, None, None)),
    ],
)
def test_formats_are_found_by_rendering(
    source: str, wanted: tuple[bool, ToolFormat | None, ReasoningFormat | None]
) -> None:
    assert found(source) == wanted


def test_a_template_for_tools_alone_is_used() -> None:
    sources = {"default": templates.CHATML, "tool_use": templates.HERMES_TOOLS}
    template = JinjaChatTemplate(sources, {"bos_token": "", "eos_token": ""})
    assert find_tool_format(template) is ToolFormat.HERMES


def card_of(path: Path, template: str, **options: str) -> tuple[ModelCard, dict[str, bytes]]:
    checkpoint = make_checkpoint(path, chat_template=template, markers=MARKERS)
    return card_from_checkpoint(
        checkpoint,
        name="m",
        max_model_len=64,
        kv_capacity_tokens=64,
        dtype="",
        num_parameters=0,
        **options,
    )


def test_the_card_names_the_formats_unless_a_setting_does(tmp_path: Path) -> None:
    card, _ = card_of(tmp_path / "a", HERMES_TEMPLATE)
    assert (card.tool_format, card.reasoning_format) == ("hermes", "think")
    assert card.markers == MARKERS
    assert ModelCard.from_json(card.to_json()) == card
    none, _ = card_of(tmp_path / "b", HERMES_TEMPLATE, tool_format="none", reasoning_format="none")
    assert (none.tool_format, none.reasoning_format, none.markers) == (None, None, ())
    other, _ = card_of(tmp_path / "c", HERMES_TEMPLATE, tool_format="llama3_json")
    assert other.tool_format == "llama3_json"


def test_a_format_cannot_be_forced_on_a_template_without_tools(tmp_path: Path) -> None:
    with pytest.raises(TextInvalid, match="no chat template has a place for tools"):
        card_of(tmp_path / "a", CHATML_TEMPLATE, tool_format="hermes")
    card, _ = card_of(tmp_path / "b", CHATML_TEMPLATE, reasoning_format="think")
    assert card.reasoning_format == "think"


def test_markers_are_text_even_where_they_are_special_tokens(tmp_path: Path) -> None:
    text = "<think>a</think><tool_call>b</tool_call><|im_end|>"
    result = {}
    for name in ("auto", "none"):
        card, blobs = card_of(
            tmp_path / name, HERMES_TEMPLATE, tool_format=name, reasoning_format=name
        )
        plain = blobs.pop(card.tokenizer_digest)
        special = plain.replace(b'"special": false', b'"special": true')
        assert special != plain
        digest = digest_of(special)
        card = dataclasses.replace(card, tokenizer_digest=digest)
        tokenizer = load_text(card, {**blobs, digest: special}).tokenizer
        result[name] = tokenizer.decode(tokenizer.encode(text))
    assert result == {"auto": "<think>a</think><tool_call>b</tool_call>", "none": "ab"}


def test_formats_of_a_newer_release_count_as_none() -> None:
    assert tool_format_of("hermes") is ToolFormat.HERMES
    assert tool_format_of("xml") is tool_format_of(None) is None
    assert reasoning_format_of("think") is ReasoningFormat.THINK
    assert reasoning_format_of("channels") is reasoning_format_of(None) is None


def test_a_template_tells_which_variables_it_reads() -> None:
    template = JinjaChatTemplate(HERMES_TEMPLATE, {})
    assert {"enable_thinking", "begin_thinking"} <= template.variables
    assert "reasoning_effort" not in template.variables
    both = {"default": "{{ a }}", "tool_use": "{% set c = 1 %}{{ b }}{{ c }}"}
    assert JinjaChatTemplate(both, {}).variables == {"a", "b"}


def test_a_family_whose_template_writes_no_calls_is_known_by_its_type_or_its_words() -> None:
    silent = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = JinjaChatTemplate(silent, {})
    assert find_tool_format(template) is ToolFormat.TEXT
    assert find_tool_format(template, "kimi_k2") is ToolFormat.KIMI_K2
    assert find_tool_format(template, "qwen3") is ToolFormat.TEXT
    told = JinjaChatTemplate("Call with functools[...].\n" + silent, {})
    assert find_tool_format(told) is ToolFormat.PHI4_MINI_JSON
    told = JinjaChatTemplate("Respond with <|tool_call|> and a JSON list.\n" + silent, {})
    assert find_tool_format(told) is ToolFormat.GRANITE


def test_a_template_that_insists_on_descriptions_is_probed_with_one() -> None:
    shown = (
        "{% for p in tools[0].function.parameters.properties.values() %}{{ p.description + '.' }}"
    )
    source = f"{{% if tools %}}{shown}{{% endfor %}}{{% endif %}}{HERMES_TEMPLATE}"
    assert find_tool_format(JinjaChatTemplate(source, {})) is ToolFormat.HERMES


def test_an_unknown_tool_format_is_logged_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    card, _ = card_of(tmp_path / "a", templates.COMMAND_R_TOOLS)
    assert card.tool_format == "text"
    (said,) = [record for record in caplog.records if "unknown tool format" in record.getMessage()]
    assert "TOOL_FORMAT" in said.getMessage()
    caplog.clear()
    card_of(tmp_path / "b", HERMES_TEMPLATE)
    card_of(tmp_path / "c", templates.COMMAND_R_TOOLS, tool_format="none")
    assert not caplog.records
