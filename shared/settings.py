"""SharedSettings: settings that api and worker share, and the sentence for a bad value.

Each process has one settings class that extends this one, reads it once with `load_settings` and
hands the object down. Variables have the fields' names in capitals, without a prefix.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.logs import LogFormat, LogLevel
from shared.metrics import MetricsNames
from shared.redis.url import SCHEMES

EXIT_BAD_SETTINGS = 2

_URL_SCHEMES = tuple(f"{scheme}://" for scheme in SCHEMES)
_SECRET = frozenset({"REDIS_URL", "API_KEYS", "METRICS_KEY", "VLLM_ARGS"})  # never repeated


class SettingsError(ValueError):
    """A variable has no usable value; the text is one sentence for the operator that names it."""


class SharedSettings(BaseSettings):
    """Fields of both sides. Instances are immutable."""

    model_config = SettingsConfigDict(
        extra="ignore", env_ignore_empty=True, case_sensitive=False, frozen=True
    )

    redis_url: str = Field(
        description="Where Redis or Valkey is: a redis://, unix://, redis+sentinel:// or "
        "redis+cluster:// URL; rediss for TLS.",
    )
    namespace: str = Field(
        default="penstock",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="First part of every key; deployments that share a server differ in it.",
    )
    log_level: LogLevel = Field(
        default=LogLevel.INFO, description="Least severe log record that is written."
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="json: one object per line; text: for people; auto: json in containers.",
    )

    metrics_names: MetricsNames = Field(
        default=MetricsNames.PENSTOCK,
        description="Names of metrics that vLLM has too; penstock: with the prefix `penstock:`; "
        "vllm: vLLM's own, for boards that were made for it; both: each twice.",
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

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: object) -> object:
        if isinstance(value, str) and value.upper() in LogLevel.__members__:
            return value.upper()
        return value


SettingsT = TypeVar("SettingsT", bound=BaseSettings)


def load_settings(settings_class: type[SettingsT], **given: object) -> SettingsT:
    """Reads the environment, and what is `given` before it, by the fields' names.

    Raises SettingsError with a sentence that names the first bad one.
    """
    try:
        return settings_class(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    variable = "_".join(str(part) for part in first["loc"]).upper() or "settings"
    if first["type"] == "missing":
        return f"{variable} is not set, and it has no default."
    reason = first["msg"].removeprefix("Value error, ").rstrip(".")
    if not reason[1:2].isupper():  # it continues a sentence here
        reason = reason[:1].lower() + reason[1:]
    more = error.error_count() - 1
    rest = f" ({more} more after this one)" if more else ""
    if first["loc"] and variable in _SECRET:
        return f"{variable} cannot be used: {reason}{rest}."
    if not first["loc"]:
        return f"The settings do not fit together: {reason}{rest}."
    return f"{variable}={str(first['input'])[:80]!r} cannot be used: {reason}{rest}."
