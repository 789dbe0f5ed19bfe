"""LauncherSettings: what the environment may change about `make run`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.keys import NAMESPACE
from shared.settings import EnvironmentSettings, PartitionsText, symptom


@cache
def setting_names() -> frozenset[str]:
    """Returns the names of all settings: of the launcher, of frontends and of workers."""
    # Imported here: few processes need the names of others' settings.
    from api.settings import ApiSettings
    from worker.settings import WorkerSettings

    classes = (LauncherSettings, ApiSettings, WorkerSettings)
    return frozenset(name for settings in classes for name in settings.model_fields)


class LauncherSettings(EnvironmentSettings):
    """Read once at start. Everything else in the environment reaches the children unchanged."""

    redis_url: str = Field(
        "",
        description="Redis to use. Empty: start a private server on a unix socket.",
        json_schema_extra=symptom(
            "Several machines serve together, or Redis is managed elsewhere."
        ),
    )
    listen_redis: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}$|^$",
        description="Address and port on which the private server listens too, with a password, "
        "for workers of other machines: 10.0.0.1:6379. Not encrypted.",
        json_schema_extra=symptom("A second machine shall serve, and there is no Redis yet."),
    )
    namespace: str = Field(
        NAMESPACE,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="First part of every key.",
        json_schema_extra=symptom("Two deployments share one Redis."),
    )
    partitions: PartitionsText = Field(
        "1",
        description="Hash slots that jobs are spread over.",
        json_schema_extra=symptom("One shard of a Redis Cluster does all the work."),
    )
    host: str = Field(
        "127.0.0.1",
        description="Address the frontends listen on.",
        json_schema_extra=symptom("Other machines cannot connect."),
    )
    port: int = Field(
        8000,
        ge=1,
        le=65535,
        description="Port of the first frontend; the others take the ports that follow.",
        json_schema_extra=symptom(
            "The start ends with `cannot listen on`: another program has the port."
        ),
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Worker processes; they share the cores and the memory. "
        "On CUDA each gets devices of its own, unless PENSTOCK_DEVICE names one.",
        json_schema_extra=symptom("One worker leaves cores or GPUs idle."),
    )
    models_file: Path | None = Field(
        None,
        description="TOML file with a table [[models]] for each model; its workers are started "
        "instead of those of PENSTOCK_MODEL and PENSTOCK_WORKERS.",
        json_schema_extra=symptom("One service has to serve several models."),
    )
    frontends: int = Field(
        1,
        ge=1,
        le=64,
        description="Frontend processes.",
        json_schema_extra=symptom("A frontend uses a whole core and time to first token grows."),
    )
    data_dir: Path = Field(
        Path(".penstock"),
        description="Directory of the private server's append-only file, socket, lock and log, "
        "and frontends the bytes of files.",
        json_schema_extra=symptom("The disk of the working directory is small or slow."),
    )
    ready_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Seconds until the first token must be servable (a model may be downloading).",
        json_schema_extra=symptom(
            "The start ends with `was not ready within` while a model is downloaded."
        ),
    )
    ready_format: Literal["text", "json"] = Field(
        "text",
        description="Format of the line that reports the ready service; json: one object.",
        json_schema_extra=symptom("A script has to read where the service listens."),
    )
    stop_timeout_s: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="Seconds that running streams get to finish after the first Ctrl-C.",
        json_schema_extra=symptom("Ctrl-C cuts answers that would have ended soon."),
    )

    @property
    def redis_listen_address(self) -> tuple[str, int] | None:
        """Returns host and port of `listen_redis`."""
        host, _, port = self.listen_redis.rpartition(":")
        return (host.strip("[]"), int(port)) if port else None
