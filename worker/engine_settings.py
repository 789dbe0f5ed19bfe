"""EngineSettings: the model, the engine and what the engine may use."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.cuda_devices import DEVICE_WORDS, device_number, is_device
from shared.environment import variable_of
from shared.settings import SharedSettings, symptom
from shared.text.model_card import MAX_OVERRIDE_CHARS, parse_override
from shared.text.tool_formats import ReasoningFormat, ToolFormat
from worker.engine_options import (
    AttentionChoice,
    CpuTier,
    Dtype,
    EngineName,
    EngineOptions,
    KVCacheDtype,
    LoadFormat,
    ModelImpl,
    Quantization,
    Runner,
    VllmSampler,
    max_waiting,
    one_device,
)
from worker.engines.http.options import parse_upstreams
from worker.engines.vllm.options import parse_vllm_args
from worker.lora import parse_lora_modules

# How the model writes tool calls, and marks its reasoning; auto: as its chat template does.
if TYPE_CHECKING:
    ToolFormatChoice = str
    ReasoningFormatChoice = str
else:
    ToolFormatChoice = Literal[("auto", "none", *map(str, ToolFormat))]
    ReasoningFormatChoice = Literal[("auto", "none", *map(str, ReasoningFormat))]

MAX_VLLM_ARGS_CHARS = 65_536
MAX_UPSTREAM_CHARS = 16_384
MAX_LORA_CHARS = 65_536

# Settings that some engines do not have; their workers refuse them.
OF_ENGINES: dict[tuple[EngineName, ...], tuple[str, ...]] = {
    ("penstock",): (
        "runner",
        "echo_step_ms",
        "cpu_tier",
        "quantization",
        "attention_backend",
        "cuda_graphs",
        "batch_invariant",
        "kv_cache_dtype",
        "kv_offloading_gb",
        "kv_offloading_dir",
        "kv_offloading_dir_gb",
        "lookahead",
        "step_target_ms",
        "model_impl",
    ),
    ("vllm",): ("engine_python", "vllm_args", "vllm_sampler", "lora_modules"),
    ("http",): ("upstream_urls", "upstream_model", "upstream_key_file"),
    ("penstock", "vllm"): (
        "tensor_parallel_size",
        "dtype",
        "load_format",
        "block_size",
        "num_kv_blocks",
        "kv_cache_memory_gb",
        "max_num_batched_tokens",
        "prefix_caching",
    ),
}


def _named(name: str, value: object) -> str:
    """Returns a setting as NAME=value; of VLLM_ARGS, which may hold a token, the names alone."""
    if name != "vllm_args":
        return f"{variable_of(name)}={value}"
    args = ", ".join(map(repr, parse_vllm_args(str(value))))
    return f"PENSTOCK_VLLM_ARGS with {args}" if args else "PENSTOCK_VLLM_ARGS"


class EngineSettings(SharedSettings):
    """Fields of the engine process and of how its model is served."""

    chat_template: Path | None = Field(
        default=None,
        description="Path of a Jinja file that replaces the checkpoint's chat templates; unset: "
        "the checkpoint's. A model without any serves completions only.",
        json_schema_extra=symptom(
            "Chat requests get 400 because the checkpoint has no chat template."
        ),
    )
    tool_format: ToolFormatChoice = Field(
        default="auto",
        description="How the model writes tool calls; auto: as its chat template does, none: it "
        "does not, text: as text of the answer; docs/API.md shows the others.",
        json_schema_extra=symptom("Tool calls appear as text in answers."),
    )
    reasoning_format: ReasoningFormatChoice = Field(
        default="auto",
        description="How the model marks its reasoning; auto: as its chat template does, none: it "
        "does not; docs/API.md shows the others.",
        json_schema_extra=symptom("Reasoning appears as text in answers."),
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Sampling of requests that leave it out; auto: temperature, top_k, top_p, "
        "min_p and repetition_penalty of generation_config.json; none: 1.0 and no cut.",
        json_schema_extra=symptom("Answers differ from another server's with the same request."),
    )
    override_generation_config: str = Field(
        default="",
        max_length=MAX_OVERRIDE_CHARS,
        description="JSON object of these parameters that overrides the checkpoint's, such as "
        '{"temperature": 0.6}.',
        json_schema_extra=symptom(
            "Requests without sampling parameters get answers that repeat or ramble."
        ),
    )
    runner: Runner = Field(
        default="model",
        description="model: a checkpoint's text, or its embeddings if it has a pooling; pooling: "
        "embeddings in any case; echo: repeats the prompt, no weights.",
        json_schema_extra=symptom(
            "A decoder without modules.json is to make embeddings, or clients are tested without "
            "a model."
        ),
    )
    echo_step_ms: float = Field(
        default=0.0,
        ge=0,
        le=60_000,
        description="Time that each step of the echo runner takes.",
        json_schema_extra=symptom("A load test needs the speed of a certain model."),
    )
    engine: EngineName = Field(
        default="penstock",
        description="penstock: this project's engine; vllm: vLLM's, in PENSTOCK_ENGINE_PYTHON; "
        "http: a vLLM, llama.cpp or SGLang server that runs already, at PENSTOCK_UPSTREAM_URLS.",
        json_schema_extra=symptom(
            "The model is not supported by this project's engine, or is faster in vLLM."
        ),
    )
    engine_python: str = Field(
        default="",
        max_length=4096,
        description="Python interpreter that has vLLM, for PENSTOCK_ENGINE=vllm; empty: the "
        "worker's own.",
        json_schema_extra=symptom("vLLM is installed in an environment of your own."),
    )
    vllm_args: str = Field(
        default="",
        max_length=MAX_VLLM_ARGS_CHARS,
        description="JSON object of further arguments of vLLM's EngineArgs, such as "
        '{"enforce_eager": true}.',
        json_schema_extra=symptom("vLLM needs an option that has no setting here."),
    )
    vllm_sampler: VllmSampler = Field(
        default="auto",
        description="What draws tokens with PENSTOCK_ENGINE=vllm; penstock: this project's "
        "sampler, with which a resumed output continues exactly on CPUs; vllm: vLLM's own, with "
        "which it is redrawn; "
        "auto: vllm with speculative decoding and pipeline parallelism alone.",
        json_schema_extra=symptom(
            "An output that continues after a restart must be exact, or sampling is slow."
        ),
    )
    lora_modules: str = Field(
        default="",
        max_length=MAX_LORA_CHARS,
        description="LoRA adapters, each served as a model of its own name with "
        "PENSTOCK_ENGINE=vllm: `name=directory`, separated by commas. PENSTOCK_VLLM_ARGS has "
        "vLLM's max_loras, max_lora_rank and others.",
        json_schema_extra=symptom(
            "Fine-tunes of one model need a device each, although they differ by adapters alone."
        ),
    )
    upstream_urls: str = Field(
        default="",
        max_length=MAX_UPSTREAM_CHARS,
        description="Base URLs of servers for PENSTOCK_ENGINE=http, separated by commas, each with "
        "its share: http://a:8000 weight=2, http://b:8000. PENSTOCK_MODEL names the checkpoint "
        "that they serve, whose tokenizer and chat template are used.",
        json_schema_extra=symptom(
            "A vLLM, llama.cpp or SGLang server runs already and needs a queue."
        ),
    )
    upstream_model: str = Field(
        default="",
        max_length=200,
        description="Name of the model at the upstreams; empty: they serve only one.",
        json_schema_extra=symptom("The worker does not start because an upstream has more models."),
    )
    upstream_key_file: str = Field(
        default="",
        max_length=4096,
        description="File with the API key of the upstreams; a change is read at once.",
        json_schema_extra=symptom("An upstream answers 401."),
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Devices, or processes on a CPU, that share the model's weights. Threads and "
        "memory are those of all together.",
        json_schema_extra=symptom("The model does not fit into the memory of one device."),
    )
    model_impl: ModelImpl = Field(
        default="auto",
        description="native: families of our own; transformers: its modules over our KV cache; "
        "auto: native where there is one. With PENSTOCK_ENGINE=vllm PENSTOCK_VLLM_ARGS has "
        "vLLM's model_impl.",
        json_schema_extra=symptom(
            "A model family is wrong or slow in one of the two implementations."
        ),
    )
    dtype: Dtype = Field(
        default="auto",
        description="Type of the model, and of its KV cache by default.",
        json_schema_extra=symptom(
            "The model does not fit into memory, or the device lacks its type."
        ),
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, or cuda:N for one CUDA device by its number among those that "
        "the worker sees. auto is CUDA, or the CPU where there is no NVIDIA GPU and no driver: "
        "with one that PyTorch does not find, the worker does not start.",
        json_schema_extra=symptom(
            "The worker takes a GPU that it should leave alone, or not the intended one."
        ),
    )
    load_format: LoadFormat = Field(
        default="auto",
        description="auto: safetensors; dummy: random weights.",
        json_schema_extra=symptom("Speed is measured without downloading weights."),
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of the engine; unset: "
        "OMP_NUM_THREADS, or the cores that affinity and cgroup leave to the process.",
        json_schema_extra=symptom(
            "The engine slows other programs on the machine, or leaves cores idle."
        ),
    )
    cpu_tier: CpuTier = Field(
        default="auto",
        description="auto: the fastest that runs here; reference: plain torch; packed: oneDNN's "
        "weight layout; native: compiled kernels (needs g++ once, AVX2, bfloat16).",
        json_schema_extra=symptom("Two tiers are compared, or one is suspected of wrong answers."),
    )
    quantization: Quantization = Field(
        default="none",
        description="none; int8 weights and activations: half the memory and faster, CPU only. "
        "Its answers differ: on SmolLM2-135M perplexity is 0.2 % above float32's (bfloat16's 0.1), "
        "and the best token the same in 96 % of places. int4 weights: 0.56 of int8's memory, "
        "and a little faster for one request; small models lose much (SmolLM2-135M's perplexity "
        "rises by 15 %). fp8, on CUDA: a checkpoint's weights in "
        "FP8 stay so, which none tries, or the worker does not start.",
        json_schema_extra=symptom("The model is too large or too slow on a CPU."),
    )
    attention_backend: AttentionChoice = Field(
        default="auto",
        description="On CUDA: triton: this project's kernels (compute capability 8.0 and up), "
        "sdpa: PyTorch's operators; auto: triton where it runs.",
        json_schema_extra=symptom(
            "Triton does not compile on the machine, or two backends are compared."
        ),
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Replay steps as CUDA graphs; off: every kernel is launched by itself, as "
        "debuggers and profilers want it.",
        json_schema_extra=symptom("A profiler or a debugger has to see each kernel."),
    )
    batch_invariant: bool = Field(
        default=False,
        description="On CUDA: tokens do not depend on a request's neighbours, and an output that "
        "another worker resumes continues exactly (`exact_resume`). Slower: all products are of "
        "one kernel. Native model families on one GPU, tested in bfloat16 and float32. No effect "
        "on CPUs. With vLLM: its own VLLM_BATCH_INVARIANT.",
        json_schema_extra=symptom(
            "A seeded request gives other tokens under load than alone, or resumed ones differ."
        ),
    )
    kv_cache_dtype: KVCacheDtype = Field(
        default="auto",
        description="auto: the model's; fp8 (or fp8_e4m3): keys and values in half the memory, "
        "rounded to e4m3 with a scale of 1. Native model families; not in the CPU's native tier. "
        "With vLLM: in PENSTOCK_VLLM_ARGS.",
        json_schema_extra=symptom("Requests are preempted because the KV cache is full."),
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Tokens in a KV block; unset: the backend's.",
        json_schema_extra=symptom("Short common prefixes are not found in the cache."),
    )
    num_kv_blocks: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="KV blocks, each of all layers; unset: from the memory.",
        json_schema_extra=symptom("Two runs must have the same KV cache."),
    )
    kv_cache_memory_gb: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        description="GiB for the KV cache; unset: from free memory.",
        json_schema_extra=symptom("The worker takes memory that other programs need."),
    )
    kv_offloading_gb: float = Field(
        default=0.0,
        ge=0,
        le=100_000,
        description="GiB of host memory of each worker for blocks that the KV cache evicts; 0: "
        "they are computed again when a prompt has them.",
        json_schema_extra=symptom(
            "Long conversations are computed again because the KV cache is too small for all."
        ),
    )
    kv_offloading_dir: str = Field(
        default="",
        max_length=4096,
        description="Directory on a local disk for blocks that were in that memory, also for later "
        "workers with the same model; those that only the KV cache has at a stop are lost. Empty: "
        "none. Its files are as secret as the prompts.",
        json_schema_extra=symptom(
            "Conversations are computed again after hours, or after a restart of the worker."
        ),
    )
    kv_offloading_dir_gb: float = Field(
        default=16.0,
        gt=0,
        le=1_000_000,
        description="GiB that each worker may take there.",
        json_schema_extra=symptom("The directory fills its disk, or is too small."),
    )
    memory_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Part of the free memory from which the KV cache is sized, where several "
        "workers share a device; `make run` sets it.",
        json_schema_extra=symptom("Several workers that are started one by one share a device."),
    )
    max_num_seqs: int = Field(
        default=256,
        ge=1,
        le=4096,
        description="Sequences (choices of jobs) run at once.",
        json_schema_extra=symptom(
            "Requests wait while the device has capacity, or streams are slow."
        ),
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Token budget of one step; unset: 512 on a CPU, 8192 on CUDA.",
        json_schema_extra=symptom(
            "Long prompts are computed slowly, or a step runs out of memory."
        ),
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="Prompt and output tokens; unset: the model's.",
        json_schema_extra=symptom(
            "The KV cache is too small for one sequence of the model's length."
        ),
    )
    prefix_caching: bool = Field(
        default=True,
        description="Reuse KV blocks of equal prefixes; if not, each choice computes its prompt.",
        json_schema_extra=symptom("The cost of prompts is measured without cache hits."),
    )
    lookahead: int | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Steps launched ahead; unset: 0 on CPU, 1 on CUDA.",
        json_schema_extra=symptom("A profiler has to see each step by itself."),
    )
    step_target_ms: int | None = Field(
        default=None,
        ge=0,
        le=60_000,
        description="Milliseconds of a step that computes prompts while streams run; 0: any; "
        "unset: 180, on a CPU and on CUDA.",
        json_schema_extra=symptom("Streams stutter while long prompts are computed."),
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not is_device(value):
            raise ValueError(f"must be {DEVICE_WORDS}")
        return value

    @field_validator("override_generation_config")
    @classmethod
    def _sampling_members(cls, value: str) -> str:
        parse_override(value)
        return value

    @field_validator("chat_template")
    @classmethod
    def _template_exists(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            path = value.expanduser()
        except RuntimeError as error:  # "~name" of no user
            raise ValueError(str(error)) from None
        if not path.is_file():
            raise ValueError(f"there is no file {str(value)!r}")
        return path

    @field_validator("upstream_urls")
    @classmethod
    def _upstream_addresses(cls, value: str) -> str:
        parse_upstreams(value)
        return value

    @field_validator("lora_modules")
    @classmethod
    def _adapters(cls, value: str) -> str:
        """Returns it with absolute directories: the engine process has another current one."""
        adapters = parse_lora_modules(value)
        for name, path in adapters.items():
            if not path.is_dir():
                raise ValueError(f"the adapter {name!r}: there is no directory {str(path)!r}")
        return ",".join(f"{name}={path}" for name, path in adapters.items())

    @field_validator("vllm_args")
    @classmethod
    def _engine_args(cls, value: str) -> str:
        parse_vllm_args(value)
        return value

    @model_validator(mode="after")
    def _fits_its_engine(self) -> Self:
        for engines, names in OF_ENGINES.items():
            for name in names if self.engine not in engines else ():
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    allowed = " or ".join(f"PENSTOCK_ENGINE={engine}" for engine in engines)
                    raise ValueError(f"{_named(name, value)} is for {allowed}")
        if self.engine == "http" and not self.upstream_urls:
            raise ValueError(
                "PENSTOCK_ENGINE=http needs PENSTOCK_UPSTREAM_URLS, such as http://127.0.0.1:8000"
            )
        if self.tensor_parallel_size > 1 and self.runner != "model":
            raise ValueError(
                f"PENSTOCK_TENSOR_PARALLEL_SIZE is not for PENSTOCK_RUNNER={self.runner}"
            )
        if self.tensor_parallel_size > 1 and device_number(self.device) is not None:
            raise ValueError(
                one_device(f"PENSTOCK_DEVICE={self.device}", self.tensor_parallel_size)
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory_gb is not None:
            raise ValueError(
                "PENSTOCK_NUM_KV_BLOCKS and PENSTOCK_KV_CACHE_MEMORY_GB exclude each other"
            )
        if self.kv_offloading_gb and not self.prefix_caching:
            raise ValueError("PENSTOCK_KV_OFFLOADING_GB needs PENSTOCK_PREFIX_CACHING=true")
        if self.kv_offloading_gb and self.runner != "model":
            raise ValueError(f"PENSTOCK_KV_OFFLOADING_GB is not for PENSTOCK_RUNNER={self.runner}")
        if self.kv_offloading_dir and not self.kv_offloading_gb:
            raise ValueError(
                "PENSTOCK_KV_OFFLOADING_DIR needs PENSTOCK_KV_OFFLOADING_GB, such as 1: blocks "
                "reach the disk from there"
            )
        if self.kv_offloading_dir and self.tensor_parallel_size > 1:
            raise ValueError(
                "PENSTOCK_KV_OFFLOADING_DIR is for PENSTOCK_TENSOR_PARALLEL_SIZE=1; without it the "
                "host memory of PENSTOCK_KV_OFFLOADING_GB is used alone"
            )
        return self

    def engine_options(self, checkpoint: Path) -> EngineOptions:
        """Returns the options of the engine process: the settings that EngineOptions names."""
        values: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(EngineOptions)
            if field.name in type(self).model_fields
        }
        return EngineOptions(
            checkpoint=str(checkpoint),
            max_waiting=max_waiting(self.max_num_seqs),
            scheduling_policy="priority",  # the lanes of the queue
            **values,
        )
