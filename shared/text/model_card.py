"""ModelCard: what a frontend must know of a model, and the text files that go with it.

A worker makes the card and the blobs from a checkpoint directory and publishes both; a frontend
loads them and holds no model file. A blob's name is the SHA-256 of its content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from shared.text.base import ChatTemplate, TextInvalid, Tokenizer
from shared.text.chat_template import JinjaChatTemplate, RenderingProcesses
from shared.text.checkpoint_text import MAX_TOKENIZER_BYTES, CheckpointText, read_checkpoint_text
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.sampling_defaults import SamplingDefaults, unusable
from shared.text.tokenizer import FastTokenizer, TokenizerConfig
from shared.text.tool_formats import (
    find_reasoning_format,
    find_tool_format,
    markers,
    shows_tools,
)

log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"  # in place of a format's name

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Facts of one served model. A newer release's further members are ignored on reading."""

    name: str
    created_s: int  # Unix time of publication
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int  # token ids below it are valid; the model's, or the tokenizer's if not known
    eos_token_ids: tuple[int, ...]  # all that end a sequence, the most important first
    has_chat_template: bool
    tokenizer_digest: str
    facts_digest: str  # what tokenizer_config.json adds to tokenizer.json
    template_digest: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # role -> text
    kv_capacity_tokens: int = 0  # of the worker's whole cache
    dtype: str = ""
    num_parameters: int = 0
    owned_by: str = "penstock"
    # For members that a request leaves out: of generation_config.json, or the operator's.
    default_sampling: dict[str, float] = field(default_factory=dict)
    tool_format: str | None = None  # a ToolFormat, or a newer release's; None: no tools
    reasoning_format: str | None = None  # a ReasoningFormat, or a newer release's
    structured_output: bool = False  # whether its worker can keep outputs to a grammar

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ModelCard:
        """Raises TextInvalid."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise TextInvalid(f"not a model card: {error}") from error

    @property
    def digests(self) -> tuple[str, ...]:
        """Returns the digests of the blobs that `load_text` needs."""
        template = () if self.template_digest is None else (self.template_digest,)
        return (self.tokenizer_digest, self.facts_digest, *template)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that are nevertheless part of the output's text."""
        return markers(self.tool_format, self.reasoning_format)


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text side of a model, ready for use on any thread."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    grammars: GrammarCompiler


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
) -> tuple[ModelCard, dict[str, bytes]]:
    """Returns the card of a Hugging Face checkpoint directory, and its blobs by digest.

    `tool_format` and `reasoning_format`: AUTO probes the chat template, NONE is for none, else one
    of their enumerations. `generation_config`: AUTO takes the sampling defaults of the checkpoint's
    generation_config.json, NONE does not; `override_generation_config` goes before either. Token
    ids that end a sequence are read from that file in any case.

    Raises TextInvalid with a sentence when the directory has no usable fast tokenizer, when its
    chat template does not compile or has no place for the tools of a format that is named, or when
    a file is larger than any real one.
    """
    text = read_checkpoint_text(Path(path))
    config = _config_blob(text)
    template = _canonical_json(text.chat_templates) if text.chat_templates else None
    tokenizer = FastTokenizer.from_bytes(text.tokenizer_json, _tokenizer_config(config))
    blobs = {digest_of(blob): blob for blob in (text.tokenizer_json, config, template) if blob}
    card = ModelCard(
        name=name,
        created_s=int(time.time()) if created_s is None else created_s,
        max_model_len=max_model_len,
        vocab_size=text.vocab_size or tokenizer.vocab_size,
        eos_token_ids=_eos_token_ids(text, tokenizer),
        has_chat_template=template is not None,
        tokenizer_digest=digest_of(text.tokenizer_json),
        facts_digest=digest_of(config),
        template_digest=None if template is None else digest_of(template),
        special_tokens=dict(text.special_tokens),
        kv_capacity_tokens=kv_capacity_tokens,
        dtype=dtype,
        num_parameters=num_parameters,
        default_sampling=_default_sampling(text, generation_config, override_generation_config),
        tool_format=_tool_format(text, tool_format),
        reasoning_format=_reasoning_format(text, reasoning_format),
        structured_output=structured_output,
    )
    return card, blobs


def load_card_tokenizer(card: ModelCard, blobs: Mapping[str, bytes]) -> FastTokenizer:
    """Raises TextInvalid when a blob is missing, does not match its digest, or cannot be used."""
    return FastTokenizer.from_bytes(
        _verified(blobs, card.tokenizer_digest),
        _tokenizer_config(_verified(blobs, card.facts_digest)),
        card.markers,
    )


def load_text(
    card: ModelCard, blobs: Mapping[str, bytes], processes: RenderingProcesses | None = None
) -> TextModel:
    """Raises TextInvalid as `load_card_tokenizer` does, and RenderingUnavailable. `processes`
    render the chat template."""
    tokenizer = load_card_tokenizer(card, blobs)
    grammars = GrammarCompiler(tokenizer, card.vocab_size, card.eos_token_ids)
    if card.template_digest is None:
        return TextModel(tokenizer, None, grammars)
    source = _decoded(_verified(blobs, card.template_digest), dict[str, str])
    template = JinjaChatTemplate(source, card.special_tokens, processes=processes)
    return TextModel(tokenizer, template, grammars)


def load_tokenizer(path: Path | str) -> FastTokenizer:
    """Returns the tokenizer of a Hugging Face checkpoint directory. Raises TextInvalid."""
    text = read_checkpoint_text(Path(path))
    return FastTokenizer.from_bytes(text.tokenizer_json, _tokenizer_config(_config_blob(text)))


def digest_of(blob: bytes) -> str:
    """Returns the SHA-256 in hexadecimal: a blob's name."""
    return hashlib.sha256(blob).hexdigest()


def _verified(blobs: Mapping[str, bytes], digest: str) -> bytes:
    blob = blobs.get(digest)
    if blob is None:
        raise TextInvalid(f"the model's text file {digest[:12]} is missing")
    if len(blob) > MAX_TOKENIZER_BYTES:
        raise TextInvalid(f"the model's text file {digest[:12]} has {len(blob)} bytes: too large")
    if digest_of(blob) != digest:
        raise TextInvalid(f"the model's text file {digest[:12]} is damaged: its digest differs")
    return blob


def _config_blob(text: CheckpointText) -> bytes:
    added = {str(token_id): dict(flags) for token_id, flags in text.added_tokens.items()}
    return _canonical_json(
        {
            "special_tokens": text.special_tokens,
            "extra_special_tokens": text.extra_special_tokens,
            "added_tokens": added,
        }
    )


def _tokenizer_config(blob: bytes) -> TokenizerConfig:
    return _decoded(blob, TokenizerConfig)


def _decoded(blob: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(blob, type=kind)
    except msgspec.MsgspecError as error:
        raise TextInvalid(f"a text file of the model cannot be read: {error}") from error


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
            "a sampling default of generation_config.json is left out: no request may have it",
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
        # Compiled in any case: what cannot serve is refused now.
        template = JinjaChatTemplate(text.chat_templates, text.special_tokens, processes=processes)
        if setting == AUTO:
            return find_tool_format(template)
        if setting != NONE and not shows_tools(template):
            raise _without_tools(setting)
    finally:
        processes.close()
    return None if setting == NONE else setting


def _without_tools(setting: str) -> TextInvalid:
    return TextInvalid(f"no chat template has a place for tools: the format cannot be {setting}")


def _reasoning_format(text: CheckpointText, setting: str) -> str | None:
    if setting == AUTO:
        return find_reasoning_format(text.chat_templates)
    return None if setting == NONE else setting


def _eos_token_ids(text: CheckpointText, tokenizer: FastTokenizer) -> tuple[int, ...]:
    token = text.special_tokens.get("eos_token")
    of_tokenizer = None if token is None else tokenizer.token_id(token)
    ids = [*text.eos_token_ids, *([] if of_tokenizer is None else [of_tokenizer])]
    return tuple(dict.fromkeys(ids))
