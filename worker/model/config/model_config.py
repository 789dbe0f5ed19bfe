"""ModelConfig: a Hugging Face config.json, read strictly.

Accepts the spellings of transformers v4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and v5
(`rope_parameters`, `dtype`). Members that change the computation and that are not understood are
refused by name: a model that loads computes what its authors meant. FAMILIES has what distinguishes
one `model_type` from another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from worker.model.base import Activation, KVLayer, LayerScores, Reach
from worker.model.config.context_length import ContextLength, text_config
from worker.model.config.layer_kinds import LayerKind, Windows, layer_kinds
from worker.model.config.quantization import Fp8Format, fp8_format
from worker.model.config.rope import RopeConfig
from worker.model.config.stored_dtype import stored_dtype
from worker.model.errors import CheckpointError, UnsupportedModel

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Traits of a model_type, and the values that transformers takes for members left out."""

    architecture: str
    has_qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    has_qkv_bias: bool = False  # whatever config.json has; the output projection has none then
    has_mlp_bias: bool = False  # if config.json has it
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_kv_heads: int | None = None  # None: num_attention_heads
    max_position_embeddings: int
    eos_token_id: int | None = None
    windows: Windows = Windows.NONE
    activation: Activation = "silu"  # of the gate
    activation_member: str = "hidden_act"
    ties_word_embeddings: bool = False
    # Gemma's: norms multiply by 1 + weight, and come also after attention and feed-forward; the
    # embedding is scaled by sqrt(hidden_size), queries by query_pre_attn_scalar ** -0.5.
    is_gemma: bool = False
    local_theta: float | None = None  # of layers with windows, which have a rotation of their own
    theta: float = 10_000.0
    defaults: Mapping[str, int] = field(default_factory=dict)  # of further members


_qwen = partial(Family, num_kv_heads=32, max_position_embeddings=32_768, windows=Windows.FLAGGED)
_mistral = partial(Family, num_kv_heads=8, max_position_embeddings=131_072, eos_token_id=2)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        has_mlp_bias=True,
        max_position_embeddings=2048,
        eos_token_id=2,
    ),
    "qwen2": _qwen(architecture="Qwen2ForCausalLM", has_qkv_bias=True),
    "qwen3": _qwen(architecture="Qwen3ForCausalLM", has_qk_norm=True, head_dim=128),
    "mistral": _mistral(architecture="MistralForCausalLM", windows=Windows.EVERYWHERE),
    "ministral": _mistral(architecture="MinistralForCausalLM", windows=Windows.BY_TYPE),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        has_qk_norm=True,
        head_dim=256,
        num_kv_heads=4,
        max_position_embeddings=131_072,
        eos_token_id=1,
        windows=Windows.PATTERN,
        activation="gelu_tanh",
        activation_member="hidden_activation",
        ties_word_embeddings=True,
        is_gemma=True,
        local_theta=10_000.0,
        theta=1_000_000.0,
        defaults={"num_attention_heads": 8, "vocab_size": 262_208},
    ),
}
# Models with images whose language model is of a family, in a `text_config`: text is served.
_MULTIMODAL: Mapping[str, str] = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}

_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}
# Members that change the computation, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of local layers, where they have their own
    layers: tuple[LayerKind, ...]
    tie_word_embeddings: bool
    attention_bias: bool  # of the query, key and value projections
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    has_qk_norm: bool  # queries and keys are normalised per head before the rotation
    activation: Activation = "silu"  # of the gate
    norms_add_one: bool = False  # norms multiply by 1 + weight
    has_output_norms: bool = False  # after attention and feed-forward, before they are added
    embedding_scale: float | None = None  # of token vectors, in the model's dtype
    attention_scale: float  # of a query times a key
    dtype: str  # the checkpoint's: one of DTYPES
    eos_token_ids: frozenset[int]
    context_length: int  # tokens of a sequence; with YaRN or linear scaling more than the positions
    fp8: Fp8Format | None = None  # of weights that are stored so; without it none is
    is_language_part: bool = False  # of a model that has more, which is not loaded

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        """What each layer keeps in the KV cache."""
        return tuple(
            KVLayer(self.num_kv_heads, self.head_dim, self.head_dim, layer.window)
            for layer in self.layers
        )

    @property
    def layer_scores(self) -> tuple[LayerScores, ...]:
        """What each layer's attention computes."""
        return tuple(
            LayerScores(scale=self.attention_scale, reach=Reach(window=layer.window))
            for layer in self.layers
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Reads config.json and generation_config.json.

        Raises UnsupportedModel naming the member at fault, CheckpointError for files that are
        missing or no JSON objects.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        raw = read_json(directory / "config.json")
        if not any(text_config(raw).get(member) for member in ("dtype", "torch_dtype")):
            raw = {**raw, "dtype": stored_dtype(directory)}
        generation = directory / "generation_config.json"
        return cls.from_dict(raw, read_json(generation) if generation.exists() else {})

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Returns the config from the files' parsed contents. Raises UnsupportedModel."""
        raw, is_part = _language_model(raw)
        family = _check_family(raw)
        raw = {**family.defaults, **raw}
        num_layers = _whole(raw, "num_hidden_layers")
        num_heads = _whole(raw, "num_attention_heads")
        hidden_size = _whole(raw, "hidden_size")
        head_dim = _whole(raw, "head_dim", family.head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even, got {head_dim}")
        left_out = family.num_kv_heads if "num_key_value_heads" not in raw else None
        num_kv_heads = _whole(raw, "num_key_value_heads", left_out or num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads {num_kv_heads} does not divide "
                f"num_attention_heads {num_heads}"
            )
        positions = _whole(raw, "max_position_embeddings", family.max_position_embeddings)
        context = ContextLength.of({**raw, "max_position_embeddings": positions})
        assert context is not None, "the positions are there"
        biased = _attention_bias(raw, family)
        rope, local_rope = _ropes(raw, family, positions)
        return cls(
            vocab_size=_whole(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_whole(raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_fraction(raw, "rms_norm_eps", 1e-6),
            max_position_embeddings=positions,
            rope=rope,
            local_rope=local_rope,
            layers=layer_kinds(raw, family.windows, num_layers, context.default),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings", family.ties_word_embeddings),
            attention_bias=biased,
            output_bias=biased and not family.has_qkv_bias,
            mlp_bias=_flag(raw, "mlp_bias"),
            has_qk_norm=family.has_qk_norm,
            activation=family.activation,
            norms_add_one=family.is_gemma,
            has_output_norms=family.is_gemma,
            embedding_scale=hidden_size**0.5 if family.is_gemma else None,
            attention_scale=_attention_scale(raw, family, head_dim),
            dtype=_dtype(raw),
            eos_token_ids=_eos_token_ids(raw, generation or {}, family),
            context_length=context.default,
            fp8=fp8_format(raw),
            is_language_part=is_part,
        )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _language_model(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Returns the members of a multimodal model's language model, and True; else `raw`."""
    model_type, inner = raw.get("model_type"), raw.get("text_config")
    if not isinstance(model_type, str) or model_type not in _MULTIMODAL:
        return raw, False
    if not isinstance(inner, Mapping):
        raise UnsupportedModel(f"text_config of model_type {model_type!r} must be an object")
    if (architectures := raw.get("architectures")) and _MULTIMODAL[model_type] not in architectures:
        raise UnsupportedModel(
            f"architectures {architectures!r} is not supported for model_type {model_type!r}"
        )
    # Whether the output matrix is the embedding is a member of the whole model.
    tie = {"tie_word_embeddings": raw.get("tie_word_embeddings")}
    return {**text_config(raw), **tie, "architectures": None}, True


def _check_family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModel(f"model_type {model_type!r} is not supported; known are {known}")
    architectures = raw.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise UnsupportedModel(
            f"architectures {architectures!r} is not supported for model_type {model_type!r}; "
            f"it must be {family.architecture!r}"
        )
    accepted = _ACTIVATIONS[family.activation]
    if (act := raw.get(family.activation_member, accepted[0])) not in accepted:
        raise UnsupportedModel(
            f"{family.activation_member} {act!r} is not supported; it must be {accepted[0]!r}"
        )
    for member, neutral in _NEUTRAL.items():
        if raw.get(member) not in neutral:
            raise UnsupportedModel(f"{member} is not supported")
    if _flag(raw, "mlp_bias") and not family.has_mlp_bias:
        raise UnsupportedModel(f"mlp_bias is not part of model_type {model_type!r}")
    return family


def _attention_scale(raw: Mapping[str, Any], family: Family, head_dim: int) -> float:
    scalar = _whole(raw, "query_pre_attn_scalar", 256) if family.is_gemma else head_dim
    return float(scalar**-0.5)


def _ropes(
    raw: Mapping[str, Any], family: Family, positions: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rotation, and the one of local layers where the family has two: in members of
    their own, or in one object for each type of layers."""
    if family.local_theta is None:
        return RopeConfig.from_dict(raw, positions), None
    given = raw.get("rope_parameters") or {}
    types = ("full_attention", "sliding_attention")
    if not isinstance(given, Mapping) or set(given) - set(types):
        raise UnsupportedModel(f"rope_parameters must be an object of {' and '.join(types)}")
    own = {
        "full_attention": {"rope_theta": raw.get("rope_theta") or family.theta}
        | dict(raw.get("rope_scaling") or {}),
        "sliding_attention": {"rope_theta": raw.get("rope_local_base_freq") or family.local_theta},
    }
    rest = {name: raw[name] for name in raw if name not in ("rope_scaling", "rope_theta")}
    full, local = (
        RopeConfig.from_dict(
            {**rest, "rope_parameters": own[kind] | dict(given.get(kind) or {})}, positions
        )
        for kind in types
    )
    return full, local


def _attention_bias(raw: Mapping[str, Any], family: Family) -> bool:
    if not family.has_qkv_bias:
        return _flag(raw, "attention_bias")
    if raw.get("attention_bias") is False:
        raise UnsupportedModel(f"attention_bias false contradicts model_type {raw['model_type']!r}")
    return True


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {value!r} is not supported; known are {', '.join(DTYPES)}")
    return name


def _eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], family: Family
) -> frozenset[int]:
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id", family.eos_token_id)
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise UnsupportedModel(f"eos_token_id {value!r} must be a token id or a list of them")
    return frozenset(ids)


def _whole(
    raw: Mapping[str, Any], member: str, default: int | None = None, minimum: int = 1
) -> int:
    value = raw.get(member)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UnsupportedModel(
            f"{member} must be a whole number of at least {minimum}, got {value!r}"
        )
    return value


def _fraction(raw: Mapping[str, Any], member: str, default: float) -> float:
    value = raw.get(member, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise UnsupportedModel(f"{member} must be between 0 and 1, got {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], member: str, default: bool = False) -> bool:
    value = raw.get(member)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise UnsupportedModel(f"{member} must be true or false, got {value!r}")
    return value
