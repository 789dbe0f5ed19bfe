"""ApiSettings: every variable of the frontend, with its unit and bounds."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from api.http.origins import ANY, AllowedHosts, AllowedOrigins, host_of, is_loopback
from api.limit_settings import LimitSettings
from shared.messages import Durability
from shared.settings import symptom

MAX_ACCEPT_WAIT_S = 10.0  # shared.redis.connections has the same


class ApiSettings(LimitSettings):
    """Read once by `api.process`."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Any other than a loopback address requires keys, or "
        "PENSTOCK_ALLOW_WITHOUT_KEYS.",
        json_schema_extra=symptom("Other machines cannot connect."),
    )
    published_host: str = Field(
        default="",
        description="Address at which the port is published outside of a container, if not "
        "PENSTOCK_HOST.",
        json_schema_extra=symptom(
            "A container whose port only this machine reaches does not start without keys."
        ),
    )
    port: int = Field(
        default=8000,
        ge=0,
        le=65535,
        description="Port; 0 takes any free one.",
        json_schema_extra=symptom("The start ends with `address already in use`."),
    )

    refuse_unused_parameters: bool = Field(
        default=False,
        description="Refuse (400) parameters that have no effect, instead of ignoring them: "
        'docs/API.md, "Ignored parameters".',
        json_schema_extra=symptom("Clients believe that an ignored parameter had an effect."),
    )
    model_retention_s: float = Field(
        default=600.0,
        ge=0,
        le=86_000,
        description="Seconds after the last worker of a model is gone in which requests for it "
        "are still accepted: they wait in the queue for a worker.",
        json_schema_extra=symptom("Requests get 404 while the workers of a model restart."),
    )
    keep_models: str = Field(
        default="",
        max_length=8192,
        description="Models, separated by commas, whose requests are always accepted once a "
        "worker has announced them: to scale workers from zero.",
        json_schema_extra=symptom("Requests get 404 while a model is scaled to zero."),
    )
    accept_durability: Durability = Field(
        default=Durability.NONE,
        description="What acceptance of a request waits for by default: none, fsync (the job is"
        " in Redis' append-only file on disk; Redis 7.2 or newer), replicas "
        "(PENSTOCK_ACCEPT_REPLICAS of them have it).",
        json_schema_extra=symptom(
            "Accepted requests must survive a power failure or a failover of Redis."
        ),
    )
    accept_replicas: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Replicas of Redis that `replicas` waits for.",
        json_schema_extra=symptom(
            "Accepted requests must survive the loss of several Redis servers."
        ),
    )
    accept_timeout_s: float = Field(
        default=5.0,
        ge=0.1,
        le=MAX_ACCEPT_WAIT_S,
        description="Seconds that acceptance waits for this; then the request is a 503.",
        json_schema_extra=symptom("Requests get 503 while Redis syncs to a slow disk."),
    )
    job_retention_s: float = Field(
        default=3600.0,
        ge=60,
        le=604_800,
        description="Seconds that the record of a job is kept after its end: state, timings, "
        "counts. 5.6 KB of Redis each. If Redis is nearly full, the oldest go after ten "
        "minutes.",
        json_schema_extra=symptom(
            "Jobs get 410 `job_expired` while people still look at them, or ended jobs fill Redis."
        ),
    )
    text_retention_s: float | None = Field(
        default=None,
        ge=60,
        le=604_800,
        description="Seconds that the text of a job is kept after its end, at most "
        "PENSTOCK_JOB_RETENTION_S, which is the default: its log, 23 KB per 1,000 "
        "tokens, 4.4 KB at least. If Redis is nearly full, the oldest go a minute after they "
        "were read.",
        json_schema_extra=symptom(
            "Links to answers get 410 `job_expired`, or texts must not stay in Redis for long."
        ),
    )
    max_retention_s: float = Field(
        default=86_400.0,
        ge=60,
        le=86_400,
        description="The most seconds that a request may have its job kept (`expires_after`).",
        json_schema_extra=symptom("Requests that ask to be kept for a day fill Redis."),
    )
    response_ttl_s: float = Field(
        default=3600.0,
        ge=1,
        le=86_400,
        description="Seconds that a stored response is kept after its end, or after its last use "
        "as a previous response.",
        json_schema_extra=symptom(
            "`previous_response_id` is not found, or stored responses fill Redis."
        ),
    )
    keepalive_s: float = Field(
        default=10.0,
        ge=0.05,
        le=15.0,
        description="Seconds of silence in a stream before a keep-alive comment.",
        json_schema_extra=symptom("A proxy closes streams that are silent during long prompts."),
    )
    write_timeout_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="Seconds without progress after which a client that stopped reading is cut "
        "off; 0: never.",
        json_schema_extra=symptom("Clients that stopped reading keep connections open."),
    )
    outage_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="Seconds that an open stream waits for an unreachable Redis.",
        json_schema_extra=symptom("Streams end with an error during a failover of Redis."),
    )
    shutdown_timeout_s: float = Field(
        default=25.0,
        ge=0,
        le=3600,
        description="Seconds that open streams may continue after SIGTERM before they are cut.",
        json_schema_extra=symptom("A rolling update cuts streams."),
    )
    text_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that render templates and tokenize; of two or more, one takes only "
        "requests of at most 64 KiB.",
        json_schema_extra=symptom("Time to first token grows while workers have free slots."),
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Special tokens that users, tools and assistants write in messages, such as "
        "`<|im_start|>`, are special tokens; else they are ordinary text. Prompts of completions "
        "always have them.",
        json_schema_extra=symptom(
            "Clients send prompts in which they have written special tokens."
        ),
    )
    frontend_lease_ms: int = Field(
        default=10_000,
        ge=2000,
        le=600_000,
        description="Milliseconds without a heartbeat after which this frontend's readers count"
        " as disconnected; 20 s more while its connections are open.",
        json_schema_extra=symptom(
            "Jobs are cancelled as abandoned while a busy host pauses a frontend."
        ),
    )
    health_interval_s: float = Field(
        default=0.5,
        ge=0.05,
        le=10,
        description="Seconds between checks of workers, queue and models; /health shows the "
        "last one.",
        json_schema_extra=symptom("Many frontends load Redis with checks, or /health is late."),
    )
    cors_origins: str = Field(
        default="",
        max_length=4096,
        description="Origins whose pages may call from a browser, separated by commas; * is any, "
        "app://* is any of the scheme app. default: where there are keys any, else those of this "
        "machine (localhost, 127.0.0.1, [::1]) and of programs (app://, tauri://, "
        "vscode-webview://, every scheme that no web page has); an unset list is default alone. "
        "The server's own pages always may.",
        json_schema_extra=symptom("The browser reports a CORS error."),
    )
    allowed_hosts: str = Field(
        default="",
        max_length=4096,
        description="Names that requests may have in Host, separated by commas; *.example.com is "
        "every name below example.com, * is any. IP addresses, localhost, PENSTOCK_HOST and "
        "PENSTOCK_PUBLISHED_HOST "
        "are always allowed. Unset: where there are keys any name is.",
        json_schema_extra=symptom("Requests under the server's DNS name get 421."),
    )

    files_dir: str = Field(
        default="",
        max_length=4096,
        description="Directory for the bytes of files, the same disk for all frontends; empty: "
        "this frontend has no files and runs no batches.",
        json_schema_extra=symptom("Uploads get 503 `files_unavailable`."),
    )
    file_life_s: int = Field(
        default=30 * 86_400,
        ge=60,
        le=90 * 86_400,
        description="Seconds that a file is kept, if its upload sets no expiry, and the record "
        "of a batch after its end.",
        json_schema_extra=symptom("Results of batches are gone too early, or files fill the disk."),
    )

    api_keys: str = Field(
        default="",
        max_length=4 * 2**20,
        repr=False,
        description="Lines of `penstock keys new`, separated by line breaks or semicolons. "
        "Without any, and without PENSTOCK_API_KEYS_FILE, requests need no key.",
        json_schema_extra=symptom("Only known clients may send requests."),
    )
    api_keys_file: str = Field(
        default="",
        max_length=4096,
        description="File of API keys, a line each; it is read again when it changes.",
        json_schema_extra=symptom("Keys have to change without a restart."),
    )
    allow_without_keys: bool = Field(
        default=False,
        description="Serve any client that can reach the port, on any address, without keys.",
        json_schema_extra=symptom(
            "The start ends without keys, and a firewall or proxy decides who may call."
        ),
    )
    metrics_key: str = Field(
        default="",
        max_length=512,
        repr=False,
        description="The bearer token of GET /metrics and /metrics/deployment; empty: an API key, "
        "if keys are configured.",
        json_schema_extra=symptom("Prometheus shall hold none of the API keys."),
    )
    monitoring_without_keys: bool = Field(
        default=False,
        description="Serve the metrics, which name tenants, (without PENSTOCK_METRICS_KEY) and the "
        "whole of GET /health without a key, if keys are configured.",
        json_schema_extra=symptom("Prometheus or a health check cannot send a key."),
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in value.split(","):
            name = origin.strip()
            if name not in ("", "*", DEFAULT_ORIGINS) and not _ORIGIN.match(name):
                raise ValueError(
                    "each origin is *, default, or begins with a scheme, such as https://"
                )
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _names(cls, value: str) -> str:
        for item in value.split(","):
            name = item.strip()
            if name not in ("", ANY) and _host_name(name) is None:
                raise ValueError("each name is *, a host name without a port, or *. and a name")
        return value

    @model_validator(mode="after")
    def _text_has_a_record(self) -> Self:
        if (self.text_retention_s or 0) > self.job_retention_s:
            raise ValueError(
                "PENSTOCK_TEXT_RETENTION_S is at most PENSTOCK_JOB_RETENTION_S "
                f"({self.job_retention_s:g}): a text is kept with its job's record"
            )
        return self

    @property
    def retention_ms(self) -> tuple[int, int]:
        """Returns for how long the record and the text of an ended job are kept."""
        text_s = self.job_retention_s if self.text_retention_s is None else self.text_retention_s
        return round(self.job_retention_s * 1000), round(text_s * 1000)

    @model_validator(mode="after")
    def _who_is_let_in(self) -> Self:
        host = self.published_host or self.host
        has_keys = bool(self.api_keys.strip() or self.api_keys_file)
        if not (has_keys or self.allow_without_keys or is_loopback(host)):
            raise ValueError(
                f"{host[:80]} is reachable by others and there are no keys: set PENSTOCK_API_KEYS "
                "or PENSTOCK_API_KEYS_FILE, or PENSTOCK_ALLOW_WITHOUT_KEYS=true to serve every "
                "client"
            )
        return self

    @property
    def kept_models(self) -> frozenset[str]:
        """Names of the models that are kept without a worker."""
        return frozenset(name.strip() for name in self.keep_models.split(",") if name.strip())

    def origins_for(self, *, has_keys: bool) -> AllowedOrigins:
        """Returns the origins of CORS_ORIGINS, or the default of a server with or without keys."""
        listed = (origin.strip().rstrip("/") for origin in self.cors_origins.split(","))
        origins = [origin for origin in listed if origin] or [DEFAULT_ORIGINS]
        has_default = DEFAULT_ORIGINS in origins
        if has_default and has_keys:
            origins = [ANY]
        return AllowedOrigins(origins, local=has_default)

    def hosts_for(self, *, has_keys: bool) -> AllowedHosts:
        """Returns the hosts of ALLOWED_HOSTS, or the default of a server with or without keys."""
        listed = [item.strip() for item in self.allowed_hosts.split(",") if item.strip()]
        if not listed and has_keys:
            return AllowedHosts([ANY])
        names = (_host_name(name) for name in (*listed, self.host, self.published_host))
        return AllowedHosts([name for name in names if name is not None])


DEFAULT_ORIGINS = "default"
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.")


def _host_name(item: str) -> str | None:
    """Returns an item of ALLOWED_HOSTS as in a Host header (IDNA, lower case); None: no name."""
    if item == ANY:
        return ANY
    is_below = item.startswith("*.")
    try:
        name = item.removeprefix("*.").encode("idna").decode("ascii")
    except UnicodeError:
        return None
    host = None if ":" in name or "*" in name else host_of(name)
    return f"*.{host}" if is_below and host is not None else host
