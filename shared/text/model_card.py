"""ModelCard: a frontend's facts about a model, and the model's text files.

A worker makes the card and the blobs from a checkpoint directory and publishes both; a frontend
loads them and holds no model file. A blob's name is the SHA-256 of its content.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from shared.messages import InvalidParameter, SamplingParams
from shared.text.base import ChatTemplate, GrammarChecks, TextInvalid, Tokenizer
from shared.text.special_text import SpecialTexts
from shared.text.tool_formats import markers

DIGEST_CHARS = 32  # of a digest that only distinguishes models
MAX_TOKENIZER_BYTES = 128 * 2**20  # the largest published ones are a quarter of it


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
    kv_capacity_tokens: int = 0  # that the worker's cache has room for in one sequence
    context_length: int = 0  # that the checkpoint allows, at least max_model_len; 0: not known
    dtype: str = ""
    num_parameters: int = 0
    owned_by: str = "penstock"
    # For members that a request leaves out: of generation_config.json, or the operator's.
    default_sampling: dict[str, float] = field(default_factory=dict)
    suggestions: tuple[str, ...] = ()  # questions that the model can answer, for a first chat
    tool_format: str | None = None  # a ToolFormat, or a newer release's; None: no tools
    reasoning_format: str | None = None  # a ReasoningFormat, or a newer release's
    structured_output: bool = False  # whether its worker can keep outputs to a grammar
    structured_output_reason: str = ""  # why not, where it is the vocabulary's fault
    engine: str = "penstock"  # what computes it: "penstock", "vllm", "http", or a newer release's
    engine_version: str = ""  # of vLLM, or of the upstreams with their names
    # Whether an output that is cut, by the death of an engine or a worker, continues with the
    # tokens that it would have had.
    exact_resume: bool = True
    embedding_size: int = 0  # numbers of its vectors; 0: it generates text
    parent: str = ""  # name of the model whose LoRA adapter this is, else empty

    def to_json(self) -> bytes:
        """Returns the card as JSON, as workers announce it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> ModelCard:
        """Raises TextInvalid."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise TextInvalid(f"not a model card: {error}") from error

    @property
    def prompt_digest(self) -> str:
        """Returns the digest of all that a prepared prompt depends on.

        Weights are not part of it, and an adapter's name is not: a prompt means the same to a
        checkpoint that was trained further, so jobs may wait while such a one takes over.
        """
        parts = (
            self.parent or self.name,
            self.tokenizer_digest,
            self.facts_digest,
            self.template_digest or "",
            str(self.vocab_size),
            *(text for item in sorted(self.special_tokens.items()) for text in item),
        )
        return digest_of(msgspec.json.encode(parts))[:DIGEST_CHARS]

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
    """The text side of a model, ready for use on any thread; made by `text_model.load_text`."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    grammars: GrammarChecks
    is_local: bool = True  # else another process encodes: not on an event loop
    special_texts: SpecialTexts | None = None  # None: those in messages are special tokens
    close: Callable[[], None] = field(default=lambda: None, compare=False)  # ends that process


def digest_of(blob: bytes) -> str:
    """Returns the SHA-256 in hexadecimal: a blob's name."""
    return hashlib.sha256(blob).hexdigest()


def missing_file(digest: str) -> str:
    """Returns the sentence about a blob that is not stored."""
    return f"the model's text file {digest[:12]} is missing"


MEMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
KEEP_ALL_TOP_K = -1  # vLLM's and older checkpoints' value for 0
MAX_OVERRIDE_CHARS = 4096

_NEUTRAL: Mapping[str, float | int] = MappingProxyType(
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`values`: of some of MEMBERS, each within the range that a request's has."""

    values: Mapping[str, float | int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> SamplingDefaults:
        """Returns those of `values` that can be used."""
        found = {name: _checked(name, value) for name, value in values.items()}
        return cls({name: value for name, value in found.items() if value is not None})

    def fill(
        self, requested: Mapping[str, float | int | None], *, neutral_temperature: float = 1.0
    ) -> dict[str, Any]:
        """Returns all MEMBERS for a SamplingParams: as `requested`, else the checkpoint's, else the
        neutral value (or `neutral_temperature`)."""
        neutral = {**_NEUTRAL, "temperature": neutral_temperature, **self.values}
        given = {name: value for name, value in requested.items() if value is not None}
        return {**neutral, **given}


def unusable(values: Mapping[str, object]) -> dict[str, object]:
    """Returns those of `values`, by name, that SamplingDefaults leaves out."""
    return {name: value for name, value in values.items() if _checked(name, value) is None}


def parse_override(text: str) -> dict[str, float | int]:
    """Returns the members of a JSON object; {} for no text. Raises ValueError with a sentence."""
    if not text.strip():
        return {}
    if len(text) > MAX_OVERRIDE_CHARS:
        raise ValueError(f"has more than {MAX_OVERRIDE_CHARS} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError('is not a JSON object, such as {"temperature": 0.6}')
    checked = {}
    for name, value in values.items():
        if name not in MEMBERS:
            raise ValueError(f"has {name[:40]!r}; it may have {', '.join(MEMBERS)}")
        usable = _checked(name, value)
        if usable is None:
            raise ValueError(f"has an invalid value of {name}")
        checked[name] = usable
    return checked


def _checked(name: str, value: object) -> float | int | None:
    """Returns the value as SamplingParams takes it; None if SamplingParams refuses it."""
    if name not in MEMBERS or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        return None
    if name == "top_k":  # cards hold numbers: 20.0 is 20
        if value != int(value):
            return None
        value = 0 if value == KEEP_ALL_TOP_K else int(value)
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except InvalidParameter:
        return None
    return value
