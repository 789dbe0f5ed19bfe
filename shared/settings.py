"""SharedSettings: settings that api and worker share, and the sentence for a bad value.

Each process has one settings class that extends this one, reads it once with `load_settings` and
hands the object down. Variables are the fields' names in capitals with the prefix PENSTOCK_.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, JsonValue, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.environment import PREFIX, is_link, misspelling_warnings, variable_of
from shared.logs import LogFormat, LogLevel
from shared.metrics import MetricsNames
from shared.partitions import PartitionCount
from shared.process import REPORT_FD
from shared.redis.url import SCHEMES

EXIT_BAD_SETTINGS = 2

log = logging.getLogger(__name__)

_URL_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)
_SECRET = frozenset({"REDIS_URL", "API_KEYS", "METRICS_KEY", "VLLM_ARGS"})  # never repeated


class SettingsError(ValueError):
    """A variable has no usable value; the text is one sentence for the operator that names it."""


class _Environment(EnvSettingsSource):
    """The environment without the addresses that Kubernetes sets for a Service `penstock`."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        return None if isinstance(value, str) and is_link(value) else value, key, is_complex


class EnvironmentSettings(BaseSettings):
    """Settings that only environment variables give; an empty variable is the default."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)


def symptom(sentence: str) -> dict[str, JsonValue]:
    """Returns the metadata of a field: what an operator sees who has to set it (docs/CONFIG.md)."""
    return {"symptom": sentence}


def _check_partitions(text: str) -> str:
    PartitionCount.parse(text)
    return text


PartitionsText = Annotated[str, AfterValidator(_check_partitions)]


class SharedSettings(EnvironmentSettings):
    """Fields of both sides. Instances are immutable."""

    model_config = SettingsConfigDict(frozen=True)

    redis_url: str = Field(
        description="URL of Redis or Valkey: a redis://, unix://, redis+sentinel:// or "
        "redis+cluster:// URL; rediss for TLS.",
        json_schema_extra=symptom(
            "Several machines serve together, or Redis is managed elsewhere."
        ),
    )
    namespace: str = Field(
        default="penstock",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="First part of every key; deployments that share a server differ in it.",
        json_schema_extra=symptom("Two deployments share one Redis."),
    )
    partitions: PartitionsText = Field(
        default="1",
        description="Hash slots that jobs are spread over, so that a cluster's shards share the "
        "load: as many as it has shards, or two to four times as many. 1+3: new jobs go to one, "
        "and three more are drained.",
        json_schema_extra=symptom("One shard of a Redis Cluster does all the work."),
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO,
        description="Least severe log record that is written.",
        json_schema_extra=symptom("The log is too long, or does not show the cause of a fault."),
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="json: one object per line; text: for people; auto: json in containers.",
        json_schema_extra=symptom("A log collector needs JSON, or a terminal shows it."),
    )

    metrics_names: MetricsNames = Field(
        default=MetricsNames.PENSTOCK,
        description="Names of metrics that vLLM has too; penstock: with the prefix `penstock:`; "
        "vllm: vLLM's own, for boards that were made for it; both: each twice.",
        json_schema_extra=symptom("A dashboard made for vLLM shows no data."),
    )

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(_URL_SCHEMES):
            raise ValueError(
                "must begin with redis://, rediss://, unix://, redis+sentinel:// or "
                "redis+cluster://"
            )
        return value

    @property
    def partition_count(self) -> PartitionCount:
        return PartitionCount.parse(self.partitions)

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        if isinstance(value, str) and value.upper() in LogLevel.__members__:
            return value.upper()
        return value


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load_settings(settings_class: type[SettingsT], **given: object) -> SettingsT:
    """Reads the environment, and the values `given` before it, by the fields' names.

    Raises SettingsError with a sentence that names the first bad one.
    """
    try:
        return settings_class(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def log_misspellings(settings_class: type[BaseSettings]) -> None:
    """Logs variables that misspell a setting, unless a launcher has started this process: it knows
    the settings of all processes and warns of each unknown one."""
    if REPORT_FD in os.environ:
        return
    for sentence in misspelling_warnings(os.environ, settings_class.model_fields):
        log.warning(sentence)


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    variable = "_".join(str(part) for part in first["loc"]).upper() or "settings"
    if first["type"] == "missing":
        return f"{variable_of(variable)} is not set, and it has no default."
    shown = variable_of(variable)
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not reason[1:2].isupper():  # it continues a sentence here
        reason = reason[:1].lower() + reason[1:]
    more = error.error_count() - 1
    rest = f" ({more} more after this one)" if more else ""
    if first["loc"] and variable in _SECRET:
        return f"{shown} cannot be used: {reason}{rest}."
    if not first["loc"]:
        return f"The settings do not fit together: {reason}{rest}."
    return f"{shown}={str(first['input'])[:80]!r} cannot be used: {reason}{rest}."
