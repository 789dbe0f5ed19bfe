"""The text files of a Hugging Face checkpoint directory, read with bounds; its card and blobs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shared.text.base import TextInvalid
from shared.text.chat_template import JinjaChatTemplate, RenderingProcesses
from shared.text.checkpoint_files import read_bytes, read_json
from shared.text.checkpoint_templates import chat_templates, template_file
from shared.text.model_card import (
    MAX_TOKENIZER_BYTES,
    MEMBERS,
    ModelCard,
    SamplingDefaults,
    digest_of,
    unusable,
)
from shared.text.template_formats import find_reasoning_format, find_tool_format, shows_tools
from shared.text.tokenizer import FastTokenizer, TokenizerConfig
from shared.text.tool_formats import ToolFormat

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"  # instead of a format's name
MAX_ID_DIGITS = 20
MAX_SUGGESTIONS = 8
MAX_SUGGESTION_CHARS = 200

_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def card_from_checkpoint(
    path: Path | str,
    *,
    name: str,
    max_model_len: int,
    kv_capacity_tokens: int,
    dtype: str,
    num_parameters: int,
    created_s: int | None = None,
    tool_format: str = AUTO,
    reasoning_format: str = AUTO,
    structured_output: bool = False,
    generation_config: str = AUTO,
    override_generation_config: Mapping[str, float] = MappingProxyType({}),
    chat_template: Path | None = None,
    context_length: int = 0,
) -> tuple[ModelCard, dict[str, bytes]]:
    """Returns the card of a Hugging Face checkpoint directory, and its blobs by digest.

    `tool_format` and `reasoning_format`: AUTO probes the chat template, NONE is for none, else one
    of their enumerations. `generation_config`: AUTO takes the sampling defaults of the checkpoint's
    generation_config.json, NONE does not; `override_generation_config` goes before either. Token
    ids that end a sequence are read from that file in any case: see `end_token_ids`.
    `chat_template`: a Jinja file instead of the checkpoint's templates.

    Raises TextInvalid with a sentence when the directory has no usable fast tokenizer, when its
    chat template does not compile or has no place for the tools of a format that is named, or when
    a file is larger than any real one.
    """
    text = read_checkpoint_text(Path(path))
    if chat_template is not None:
        text = replace(text, chat_templates=template_file(chat_template))
    config = _tokenizer_config(text)
    config_blob = _config_blob(config)
    template = _canonical_json(text.chat_templates) if text.chat_templates else None
    tokenizer = FastTokenizer.from_bytes(text.tokenizer_json, config)
    blobs = {digest_of(blob): blob for blob in (text.tokenizer_json, config_blob, template) if blob}
    card = ModelCard(
        name=name,
        created_s=int(time.time()) if created_s is None else created_s,
        max_model_len=max_model_len,
        vocab_size=text.vocab_size or tokenizer.vocab_size,
        eos_token_ids=end_token_ids(text, tokenizer),
        has_chat_template=template is not None,
        tokenizer_digest=digest_of(text.tokenizer_json),
        facts_digest=digest_of(config_blob),
        template_digest=None if template is None else digest_of(template),
        special_tokens=dict(text.special_tokens),
        kv_capacity_tokens=kv_capacity_tokens,
        context_length=context_length,
        dtype=dtype,
        num_parameters=num_parameters,
        default_sampling=_default_sampling(text, generation_config, override_generation_config),
        suggestions=text.suggestions,
        tool_format=_tool_format(text, tool_format),
        reasoning_format=_reasoning_format(text, reasoning_format),
        structured_output=structured_output,
    )
    return card, blobs


def load_tokenizer(path: Path | str) -> FastTokenizer:
    """Returns the tokenizer of a Hugging Face checkpoint directory. Raises TextInvalid."""
    return load_tokenizer_and_eos(path)[0]


def load_tokenizer_and_eos(path: Path | str) -> tuple[FastTokenizer, tuple[int, ...]]:
    """Returns the tokenizer of a checkpoint directory, and the token ids that end a sequence: those
    of its card. Raises TextInvalid."""
    text = read_checkpoint_text(Path(path))
    tokenizer = FastTokenizer.from_bytes(text.tokenizer_json, _tokenizer_config(text))
    return tokenizer, end_token_ids(text, tokenizer)


@dataclass(frozen=True, slots=True)
class CheckpointText:
    """The files' content, reduced to what serving needs."""

    tokenizer_json: bytes
    special_tokens: Mapping[str, str]  # "bos_token" -> "<s>", ...
    extra_special_tokens: tuple[str, ...]  # special without a role
    added_tokens: Mapping[int, Mapping[str, Any]]  # id -> flags of tokenizers.AddedToken
    chat_templates: Mapping[str, str]  # by name; empty: none
    eos_token_ids: tuple[int, ...]  # of generation_config.json, else of config.json
    vocab_size: int | None  # the width of the model's output, from config.json
    default_sampling: Mapping[str, object]  # of generation_config.json, unchecked
    model_type: str = ""  # of config.json
    suggestions: tuple[str, ...] = ()  # of generation_config.json


def read_checkpoint_text(path: Path) -> CheckpointText:
    """Raises TextInvalid when the directory has no fast tokenizer or a file cannot be used."""
    if not path.is_dir():
        raise TextInvalid(f"{path} is not a checkpoint directory")
    tokenizer_json = read_bytes(path / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if tokenizer_json is None:
        raise TextInvalid(f"{path} has no tokenizer.json")
    config = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json")
    declared = _declared_tokens(path, tokenizer_config)
    inner = config.get("text_config")
    model = {**config, **inner} if isinstance(inner, dict) else config
    vocab_size, model_type = model.get("vocab_size"), config.get("model_type")
    text = CheckpointText(
        tokenizer_json=tokenizer_json,
        special_tokens=_special_tokens(declared),
        extra_special_tokens=_extra_special_tokens(declared),
        added_tokens=_added_tokens(tokenizer_config),
        chat_templates=chat_templates(path, tokenizer_config),
        eos_token_ids=_token_ids(generation) or _token_ids(config) or _token_ids(model),
        vocab_size=vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else None,
        model_type=model_type if isinstance(model_type, str) else "",
        default_sampling={
            name: generation[name] for name in MEMBERS if generation.get(name) is not None
        },
        suggestions=_suggestions(generation.get("suggestions")),
    )
    _check_encodable(path, "special tokens", [text.special_tokens, text.extra_special_tokens])
    _check_encodable(path, "added tokens", text.added_tokens)
    _check_encodable(path, "chat templates", text.chat_templates)
    _check_encodable(path, "suggestions", text.suggestions)
    return text


def _check_encodable(path: Path, what: str, content: object) -> None:
    """Raises TextInvalid for a lone surrogate: JSON can escape one, UTF-8 cannot carry it."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise TextInvalid(f"{path}: lone surrogate U+{code:04X} in the {what}") from error


def _content(token: object) -> str | None:
    """Returns the text of a token, which is that text or an object with it and flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _declared_tokens(path: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of tokenizer_config.json, overridden by special_tokens_map.json where
    the former predates its list of added tokens."""
    if "added_tokens_decoder" in tokenizer_config:
        return dict(tokenizer_config)
    return dict(tokenizer_config) | read_json(path / "special_tokens_map.json")


def _special_tokens(declared: Mapping[str, Any]) -> dict[str, str]:
    """Returns those that transformers hands to a template: the named ones and a model's own
    `*_token`."""
    extra = declared.get("extra_special_tokens")
    own = extra if isinstance(extra, dict) else {}
    found = {}
    for role, token in {**declared, **own}.items():
        content = _content(token)
        if content is not None and (role.endswith("_token") or role in own):
            found[role] = content
    return found


def _extra_special_tokens(declared: Mapping[str, Any]) -> tuple[str, ...]:
    listed = declared.get("extra_special_tokens") or declared.get("additional_special_tokens")
    contents = map(_content, listed if isinstance(listed, list) else ())
    return tuple(content for content in contents if content is not None)


def _added_tokens(tokenizer_config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    found = {}
    listed = tokenizer_config.get("added_tokens_decoder")
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        if not (isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise TextInvalid(f"tokenizer_config.json: added token {token_id} has no content")
        if not token_id.isdecimal() or len(token_id) > MAX_ID_DIGITS:
            raise TextInvalid(f"tokenizer_config.json: added token id {token_id!r} is not a number")
        flags = {name: token[name] for name in _TOKEN_FLAGS if name in token}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise TextInvalid(
                    f"tokenizer_config.json: added token {token_id}: {name!r} must be true or "
                    f"false, got {flag!r}"
                )
        found[int(token_id)] = {"content": token["content"], **flags}
    return found


def _suggestions(listed: object) -> tuple[str, ...]:
    """Returns the first MAX_SUGGESTIONS texts of a list; logs those that are no short text."""
    found = listed if isinstance(listed, list) else [] if listed is None else [listed]
    fitting = [x for x in found if isinstance(x, str) and 0 < len(x) <= MAX_SUGGESTION_CHARS]
    if len(fitting) < len(found) or len(fitting) > MAX_SUGGESTIONS:
        log.warning(
            "ignoring some suggestions of generation_config.json",
            extra={"used": min(len(fitting), MAX_SUGGESTIONS), "listed": len(found)},
        )
    return tuple(fitting[:MAX_SUGGESTIONS])


def _token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return tuple(item for item in ids if type(item) is int and item >= 0)


def _tokenizer_config(text: CheckpointText) -> TokenizerConfig:
    return TokenizerConfig(text.special_tokens, text.extra_special_tokens, text.added_tokens)


def _config_blob(config: TokenizerConfig) -> bytes:
    added = {str(token_id): dict(flags) for token_id, flags in config.added_tokens.items()}
    return _canonical_json(
        {
            "special_tokens": config.special_tokens,
            "extra_special_tokens": config.extra_special_tokens,
            "added_tokens": added,
        }
    )


def _canonical_json(value: object) -> bytes:
    """Returns the same bytes, and so the same digest, for the same content."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _default_sampling(
    text: CheckpointText, generation_config: str, override: Mapping[str, float]
) -> dict[str, float]:
    if generation_config == NONE:
        return dict(override)
    for name, value in unusable(text.default_sampling).items():
        log.warning(
            "ignoring an invalid sampling default of generation_config.json",
            extra={"member": name, "value": str(value)[:40]},
        )
    return {**SamplingDefaults.of(text.default_sampling).values, **override}


def _tool_format(text: CheckpointText, setting: str) -> str | None:
    if not text.chat_templates:
        if setting in (AUTO, NONE):
            return None
        raise _without_tools(setting)
    processes = RenderingProcesses()  # a worker renders nothing afterwards
    try:
        # Compiled in any case: an unusable template is refused now.
        template = JinjaChatTemplate(text.chat_templates, text.special_tokens, processes=processes)
        if setting == AUTO:
            return _found_tool_format(template, text.model_type)
        if setting != NONE and not shows_tools(template):
            raise _without_tools(setting)
    finally:
        processes.close()
    return None if setting == NONE else setting


def _found_tool_format(template: JinjaChatTemplate, model_type: str) -> str | None:
    found = find_tool_format(template, model_type)
    if found is ToolFormat.TEXT:
        log.warning(
            "unknown tool format in the chat template: tool calls will be returned as text; "
            "set PENSTOCK_TOOL_FORMAT to the model's format",
            extra={"model_type": model_type, "known": ", ".join(ToolFormat)},
        )
    return found


def _without_tools(setting: str) -> TextInvalid:
    return TextInvalid(f"no chat template has a place for tools: the format cannot be {setting}")


def _reasoning_format(text: CheckpointText, setting: str) -> str | None:
    if setting == AUTO:
        return find_reasoning_format(text.chat_templates)
    return None if setting == NONE else setting


def end_token_ids(text: CheckpointText, tokenizer: FastTokenizer) -> tuple[int, ...]:
    """Returns the token ids that end a sequence, the most important first.

    As transformers and vLLM have it: those of generation_config.json, else those of config.json;
    and the tokenizer's own. Ids outside the vocabulary, which no model can write, are left out.
    """
    token = text.special_tokens.get("eos_token")
    of_tokenizer = None if token is None else tokenizer.token_id(token)
    ids = [*text.eos_token_ids, *([] if of_tokenizer is None else [of_tokenizer])]
    vocab_size = text.vocab_size or tokenizer.vocab_size
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id < vocab_size))
