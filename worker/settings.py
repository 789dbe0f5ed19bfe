"""WorkerSettings: every variable of the worker, with its unit and bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from shared.settings import symptom
from worker.engine_settings import EngineSettings
from worker.lora import parse_lora_modules
from worker.model.config.gguf_header import model_name

DEMO_CHECKPOINT = Path(__file__).parent / "demo" / "checkpoint"
DEMO_MODEL_NAME = "penstock-demo"
_NAME = r"[^\s{}]*"
MAX_NAME = 200


MAX_MODELS = 64  # of one worker


def listed_models(text: str) -> dict[str, str]:
    """Returns the models of MODELS by their names in requests: `name=model`, or a model alone.

    Raises ValueError with a sentence.
    """
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, equals, model = entry.partition("=")
        if not equals or "/" in name:
            name, model = served_name(entry, ""), entry
        if not model or re.fullmatch(_NAME, name) is None or not name or len(name) > MAX_NAME:
            raise ValueError(f"{entry!r} is neither a model nor a name, `=` and a model")
        if name in found:
            raise ValueError(f"{name!r} names two models; give one of them a name by `name=model`")
        found[name] = model
    if len(found) > MAX_MODELS:
        raise ValueError(f"{len(found)} models are more than {MAX_MODELS}")
    return found


def served_name(model: str, served_model_name: str) -> str:
    """Returns the name in requests of MODEL: as set, else a directory's or a file's name, or the
    hub id."""
    path = Path(model).expanduser()
    if model.lower().endswith(".gguf") and not path.is_dir():
        return served_model_name or model_name(path.name)
    is_directory = path.exists() or model.startswith(("/", ".", "~"))
    own_name = path.resolve().name if is_directory else model.partition("@")[0]
    return served_model_name or (own_name if model else DEMO_MODEL_NAME)


class WorkerSettings(EngineSettings):
    """Read once by `worker.main`."""

    model: str = Field(
        default="",
        description="Local checkpoint directory or GGUF file, or Hugging Face hub id: with `@` and "
        "a branch, tag or commit for a certain revision of it, with `:Q4_K_M` for a GGUF file of "
        "it. `smollm2` is a small model from the Python index; empty: the demo model.",
        json_schema_extra=symptom("The service has to serve another model than the demo."),
    )
    served_model_name: str = Field(
        default="",
        max_length=MAX_NAME,
        pattern=f"^{_NAME}$",
        description="Name in requests; empty: the hub id, or the directory's or file's name.",
        json_schema_extra=symptom("Clients ask for the model by another name and get 404."),
    )
    models: str = Field(
        default="",
        description="Models that this worker serves in turn instead of PENSTOCK_MODEL, one at a "
        "time, separated by commas: each a directory, a hub id, or `name=` and one of them. The "
        "first is loaded at the start, the others when jobs wait for them.",
        json_schema_extra=symptom("Several models share one device that has room for one."),
    )
    model_swap_wait_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="Seconds that jobs for another model of PENSTOCK_MODELS wait before a busy "
        "worker drains and loads it. An idle worker loads it at once.",
        json_schema_extra=symptom(
            "Models are swapped so often that most time goes into loading, or one waits too long."
        ),
    )

    lease_ms: int = Field(
        default=10_000,
        ge=500,
        le=600_000,
        description="Milliseconds without a heartbeat after which other workers take its jobs.",
        json_schema_extra=symptom(
            "Jobs of a dead worker restart late, or jobs move while a worker is alive."
        ),
    )
    beat_interval_ms: int = Field(
        default=500,
        ge=50,
        le=60_000,
        description="Milliseconds between heartbeats.",
        json_schema_extra=symptom("Many workers load Redis with heartbeats, or /health is late."),
    )
    stall_limit_s: float = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="Seconds without an engine step, with jobs running, until it is restarted.",
        json_schema_extra=symptom(
            "The engine is restarted during a long step, or a hang is found late."
        ),
    )
    engine_restarts: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="Engine restarts within ten minutes before giving up.",
        json_schema_extra=symptom("Kubernetes should replace a worker whose engine fails."),
    )
    load_timeout_s: float = Field(
        default=3600.0,
        ge=1,
        le=86_400,
        description="Seconds that loading the model may take.",
        json_schema_extra=symptom("The worker ends while it loads a large model from a slow disk."),
    )

    affinity_wait_ms: int = Field(
        default=40,
        ge=0,
        le=10_000,
        description="Milliseconds for which this worker leaves a waiting job to the worker whose "
        "prefix cache holds the longest part of its prompt; 0: no worker is preferred.",
        json_schema_extra=symptom(
            "Follow-up turns compute their prompts again, or a job waits although a worker is idle."
        ),
    )
    max_unflushed_tokens: int = Field(
        default=256,
        ge=1,
        le=2**20,
        description="Tokens of one job kept while Redis is away; then the engine pauses.",
        json_schema_extra=symptom("Generation pauses during short outages of Redis."),
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="Seconds for running jobs to finish after SIGTERM; the rest is requeued.",
        json_schema_extra=symptom("A rolling update moves jobs that would have ended soon."),
    )

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Port on which this worker answers scrapes of Prometheus, and probes at /ready "
        "and /live; unset: none. With several workers `make run` gives each the next one.",
        json_schema_extra=symptom("Prometheus or a probe has to reach the worker."),
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        max_length=253,
        description="Address that PENSTOCK_METRICS_PORT listens on. It asks for no key.",
        json_schema_extra=symptom("Prometheus runs on another machine."),
    )

    @property
    def named_models(self) -> dict[str, str]:
        """Returns all models of this worker by their names in requests, the first one first."""
        own = {served_name(self.model, self.served_model_name): self.model}
        return listed_models(self.models) or own

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.models and (self.model or self.served_model_name):
            raise ValueError(
                "PENSTOCK_MODELS and PENSTOCK_MODEL or PENSTOCK_SERVED_MODEL_NAME exclude each "
                "other: PENSTOCK_MODELS has its names"
            )
        if self.models and self.engine == "http":
            raise ValueError("PENSTOCK_MODELS is not for PENSTOCK_ENGINE=http, which loads nothing")
        if self.models and self.kv_offloading_dir:
            raise ValueError(
                "PENSTOCK_KV_OFFLOADING_DIR is not for PENSTOCK_MODELS, as each model that is "
                "loaded would delete the files of the one before; PENSTOCK_KV_OFFLOADING_GB is"
            )
        if self.models and self.lora_modules:
            raise ValueError(
                "PENSTOCK_MODELS and PENSTOCK_LORA_MODULES exclude each other: adapters fit one "
                "model"
            )
        adapters = parse_lora_modules(self.lora_modules)
        if adapters and set(self.named_models) & set(adapters):
            raise ValueError(
                f"PENSTOCK_LORA_MODULES: {next(iter(self.named_models))!r} is the name of the "
                "model itself"
            )
        try:
            listed_models(self.models)
        except (ValueError, OSError, RuntimeError) as error:  # a path too long, no such home
            raise ValueError(f"PENSTOCK_MODELS: {error}") from None
        if self.beat_interval_ms * 3 > self.lease_ms:
            raise ValueError(
                f"PENSTOCK_LEASE_MS ({self.lease_ms}) must be at least three times "
                f"PENSTOCK_BEAT_INTERVAL_MS ({self.beat_interval_ms})"
            )
        return self
