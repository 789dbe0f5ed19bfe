"""WorkerSettings: every variable of the worker, with its unit and bounds."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shared.cuda_devices import DEVICE_WORDS, device_number, is_device
from shared.environment import variable_of
from shared.settings import SharedSettings
from shared.text.sampling_defaults import MAX_OVERRIDE_CHARS, parse_override
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
    WeightCopies,
    max_waiting,
    one_device,
)
from worker.engines.vllm.options import parse_vllm_args

DEMO_CHECKPOINT = Path(__file__).parent / "demo" / "checkpoint"
DEMO_MODEL_NAME = "penstock-demo"


def served_name(model: str, served_model_name: str) -> str:
    """Returns the name in requests of MODEL: as set, else a directory's name or the hub id."""
    path = Path(model).expanduser()
    is_directory = path.exists() or model.startswith(("/", ".", "~"))
    own_name = path.resolve().name if is_directory else model.partition("@")[0]
    return served_model_name or (own_name if model else DEMO_MODEL_NAME)


# How the model writes calls of tools, and marks its reasoning; auto: as its chat template does.
ToolFormatChoice = Literal[
    "auto",
    "none",
    "hermes",
    "llama3_json",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "kimi_k2",
    "granite",
    "phi4_mini_json",
    "hunyuan_a13b",
    "nemotron_json",
    "cohere_command3",
    "glm45",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "pythonic",
    "functiongemma",
    "gemma4",
    "openai",
    "text",
]
ReasoningFormatChoice = Literal[
    "auto",
    "none",
    "think",
    "mistral",
    "openai",
    "granite",
    "granite33",
    "hunyuan_a13b",
    "gemma4",
    "cohere_command3",
    "seed_oss",
]

MAX_VLLM_ARGS_CHARS = 65_536

# Settings that one engine alone has; the other's worker refuses them.
OF_ONE_ENGINE: dict[EngineName, tuple[str, ...]] = {
    "penstock": (
        "runner",
        "echo_step_ms",
        "cpu_tier",
        "quantization",
        "cpu_weight_copies",
        "attention_backend",
        "cuda_graphs",
        "kv_cache_dtype",
        "lookahead",
        "step_target_ms",
        "model_impl",
    ),
    "vllm": ("engine_python", "vllm_args", "vllm_sampler"),
}


def _named(name: str, value: object) -> str:
    """Returns a setting as NAME=value; of VLLM_ARGS, which may hold a token, the names alone."""
    if name != "vllm_args":
        return f"{variable_of(name)}={value}"
    args = ", ".join(map(repr, parse_vllm_args(str(value))))
    return f"PENSTOCK_VLLM_ARGS with {args}" if args else "PENSTOCK_VLLM_ARGS"


class WorkerSettings(SharedSettings):
    """Read once by `worker.main`."""

    model: str = Field(
        default="",
        description="Local checkpoint directory or Hugging Face hub id, with `@` and a branch, tag "
        "or commit for a certain revision of it; empty: the demo model.",
    )
    served_model_name: str = Field(
        default="",
        max_length=200,
        pattern=r"^[^\s{}]*$",
        description="Name in requests; empty: the hub id, or the directory's name.",
    )
    chat_template: Path | None = Field(
        default=None,
        description="Path of a Jinja file that replaces the checkpoint's chat templates; unset: "
        "the checkpoint's. A model without any serves completions only.",
    )
    tool_format: ToolFormatChoice = Field(
        default="auto",
        description="How the model writes tool calls; auto: as its chat template does, none: it "
        "does not, text: as text of the answer; docs/API.md shows the others.",
    )
    reasoning_format: ReasoningFormatChoice = Field(
        default="auto",
        description="How the model marks its reasoning; auto: as its chat template does, none: it "
        "does not; docs/API.md shows the others.",
    )
    generation_config: Literal["auto", "none"] = Field(
        default="auto",
        description="Sampling of requests that leave it out; auto: temperature, top_k, top_p, "
        "min_p and repetition_penalty of generation_config.json; none: 1.0 and no cut.",
    )
    override_generation_config: str = Field(
        default="",
        max_length=MAX_OVERRIDE_CHARS,
        description="JSON object of these parameters that overrides the checkpoint's, such as "
        '{"temperature": 0.6}.',
    )
    runner: Runner = Field(
        default="model", description="model, or echo: repeats the prompt, no weights."
    )
    echo_step_ms: float = Field(
        default=0.0, ge=0, le=60_000, description="Time that each step of the echo runner takes."
    )
    engine: EngineName = Field(
        default="penstock",
        description="penstock: this project's engine; vllm: vLLM's, in PENSTOCK_ENGINE_PYTHON.",
    )
    engine_python: str = Field(
        default="",
        max_length=4096,
        description="Python interpreter that has vLLM, for PENSTOCK_ENGINE=vllm; empty: the "
        "worker's own.",
    )
    vllm_args: str = Field(
        default="",
        max_length=MAX_VLLM_ARGS_CHARS,
        description="JSON object of further arguments of vLLM's EngineArgs, such as "
        '{"enforce_eager": true}.',
    )
    vllm_sampler: VllmSampler = Field(
        default="auto",
        description="What draws tokens with PENSTOCK_ENGINE=vllm; penstock: this project's "
        "sampler, with which a resumed output continues exactly; vllm: vLLM's own, with which "
        "it is redrawn; "
        "auto: vllm with speculative decoding and pipeline parallelism alone.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Devices, or processes on a CPU, that share the model's weights. Threads and "
        "memory are those of all together.",
    )

    model_impl: ModelImpl = Field(
        default="auto",
        description="native: families of our own; transformers: its modules over our KV cache; "
        "auto: native where there is one. With PENSTOCK_ENGINE=vllm PENSTOCK_VLLM_ARGS has "
        "vLLM's model_impl.",
    )
    dtype: Dtype = Field(
        default="auto", description="Type of the model, and of its KV cache by default."
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, or cuda:N for one CUDA device by its number among those that "
        "the worker sees.",
    )
    load_format: LoadFormat = Field(
        default="auto", description="auto: safetensors; dummy: random weights."
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of the engine; unset: "
        "OMP_NUM_THREADS, or the cores that affinity and cgroup leave to the process.",
    )
    cpu_tier: CpuTier = Field(
        default="auto",
        description="auto: the fastest that runs here; reference: plain torch; packed: oneDNN's "
        "weight layout; native: compiled kernels (needs g++ once, AVX2, bfloat16).",
    )
    quantization: Quantization = Field(
        default="none",
        description="none, or int8 weights and activations: half the memory and faster, CPU only. "
        "Its answers differ: on SmolLM2-135M perplexity is 0.2 % above float32's (bfloat16's 0.1), "
        "and the best token the same in 96 % of places.",
    )
    cpu_weight_copies: WeightCopies = Field(
        default="auto",
        description="Second copies of weights in oneDNN's layout for steps of many rows, where "
        "products measure 1.5 times as quick, steps 1.05; auto: up to a quarter of the free "
        "memory, on: whatever they take, off: none. Native tier only.",
    )

    attention_backend: AttentionChoice = Field(
        default="auto",
        description="On CUDA: triton: this project's kernels (compute capability 8.0 and up), "
        "sdpa: PyTorch's operators; auto: triton where it runs.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Replay steps as CUDA graphs; off: every kernel is launched by itself, as "
        "debuggers and profilers want it.",
    )

    kv_cache_dtype: KVCacheDtype = Field(
        default="auto",
        description="auto: the model's; fp8 (or fp8_e4m3): keys and values in half the memory, "
        "rounded to e4m3 with a scale of 1. Native model families; not in the CPU's native tier. "
        "With vLLM: in PENSTOCK_VLLM_ARGS.",
    )
    block_size: int | None = Field(
        default=None, ge=1, le=1024, description="Tokens in a KV block; unset: the backend's."
    )
    num_kv_blocks: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="KV blocks; unset: from the memory."
    )
    kv_cache_memory_gb: float | None = Field(
        default=None, gt=0, le=10_000, description="GiB for the KV cache; unset: from free memory."
    )
    memory_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Part of the free memory from which the KV cache is sized, where several "
        "workers share a device; `make run` sets it.",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, le=4096, description="Sequences (choices of jobs) run at once."
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Token budget of one step; unset: 512 on a CPU, 8192 on CUDA.",
    )
    max_model_len: int | None = Field(
        default=None, ge=1, le=2**24, description="Prompt and output tokens; unset: the model's."
    )
    prefix_caching: bool = Field(
        default=True,
        description="Reuse KV blocks of equal prefixes; if not, each choice computes its prompt.",
    )
    lookahead: int | None = Field(
        default=None, ge=0, le=1, description="Steps launched ahead; unset: 0 on CPU, 1 on CUDA."
    )
    step_target_ms: int | None = Field(
        default=None,
        ge=0,
        le=60_000,
        description="Milliseconds of a step that computes prompts while streams run; 0: any; "
        "unset: 180, on a CPU and on CUDA.",
    )
    scheduling_policy: Literal["fcfs"] = Field(
        default="fcfs", description="Order among waiting jobs."
    )

    lease_ms: int = Field(
        default=10_000,
        ge=500,
        le=600_000,
        description="Milliseconds without a heartbeat after which other workers take its jobs.",
    )
    beat_interval_ms: int = Field(
        default=500, ge=50, le=60_000, description="Milliseconds between heartbeats."
    )
    stall_limit_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="Seconds without an engine step, with jobs running, until it is restarted.",
    )
    engine_restarts: int = Field(
        default=5, ge=0, le=1000, description="Engine restarts within ten minutes before giving up."
    )
    load_timeout_s: float = Field(
        default=3600.0, ge=1, le=86_400, description="Seconds that loading the model may take."
    )

    pull_block_ms: int = Field(
        default=1000, ge=10, le=5000, description="Milliseconds that one pull waits for a job."
    )
    reconcile_interval_s: float = Field(
        default=2.0, ge=0.1, le=60, description="Seconds between checks for lost deliveries."
    )
    flush_interval_ms: int = Field(
        default=25,
        ge=0,
        le=10_000,
        description="Longest time in milliseconds that tokens are batched when appends are slow.",
    )
    flush_tokens: int = Field(
        default=8, ge=1, le=4096, description="Tokens of one job that are sent without waiting."
    )
    max_unflushed_tokens: int = Field(
        default=256,
        ge=1,
        le=2**20,
        description="Tokens of one job kept while Redis is away; then the engine pauses.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="Seconds for running jobs to finish after SIGTERM; the rest is requeued.",
    )

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Port on which this worker answers scrapes of Prometheus, and probes at /ready "
        "and /live; unset: none. With several workers `make run` gives each the next one.",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address that PENSTOCK_METRICS_PORT listens on. It asks for no key.",
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

    @field_validator("vllm_args")
    @classmethod
    def _engine_args(cls, value: str) -> str:
        parse_vllm_args(value)
        return value

    @model_validator(mode="after")
    def _fits_its_engine(self) -> WorkerSettings:
        for engine, names in OF_ONE_ENGINE.items():
            for name in names if engine != self.engine else ():
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    raise ValueError(f"{_named(name, value)} is for PENSTOCK_ENGINE={engine}")
        if self.tensor_parallel_size > 1 and self.runner != "model":
            raise ValueError(
                f"PENSTOCK_TENSOR_PARALLEL_SIZE is not for PENSTOCK_RUNNER={self.runner}"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> WorkerSettings:
        if self.beat_interval_ms * 3 > self.lease_ms:
            raise ValueError(
                f"PENSTOCK_LEASE_MS ({self.lease_ms}) must be at least three times "
                f"PENSTOCK_BEAT_INTERVAL_MS ({self.beat_interval_ms})"
            )
        if self.tensor_parallel_size > 1 and device_number(self.device) is not None:
            raise ValueError(
                one_device(f"PENSTOCK_DEVICE={self.device}", self.tensor_parallel_size)
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory_gb is not None:
            raise ValueError(
                "PENSTOCK_NUM_KV_BLOCKS and PENSTOCK_KV_CACHE_MEMORY_GB exclude each other"
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
            checkpoint=str(checkpoint), max_waiting=max_waiting(self.max_num_seqs), **values
        )
