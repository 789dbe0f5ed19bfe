"""ApiSettings: every variable of the frontend, with its unit and bounds."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from api.http.origins import ANY, AllowedHosts, AllowedOrigins, host_of, is_loopback
from shared.messages import Durability
from shared.settings import SharedSettings

MAX_ACCEPT_WAIT_S = 10.0  # shared.redis.connections has the same


class ApiSettings(SharedSettings):
    """Read once by `api.process`."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Any other than a loopback address requires keys, or "
        "PENSTOCK_ALLOW_WITHOUT_KEYS.",
    )
    published_host: str = Field(
        default="",
        description="Address at which the port is published outside of a container, if not "
        "PENSTOCK_HOST.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes any free one.")

    max_body_bytes: int = Field(
        default=4 * 2**20,
        ge=1024,
        le=256 * 2**20,
        description="Bytes of a request body; more is a 413.",
    )
    max_open_body_bytes: int = Field(
        default=256 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of request bodies that this frontend receives at once, until they are "
        "parsed, at least twice PENSTOCK_MAX_BODY_BYTES; more are 503, of one tenant beyond its "
        "share 429.",
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds in which a request body must arrive."
    )
    refuse_unused_parameters: bool = Field(
        default=False,
        description="Refuse (400) parameters that have no effect, instead of ignoring them: "
        'docs/API.md, "Ignored parameters".',
    )
    max_open_requests: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Responses generated or streamed at once by this frontend; more are 503.",
    )
    max_answer_bytes: int = Field(
        default=64 * 2**20,
        ge=1024,
        le=2**40,
        description="Bytes of one whole response, estimated from choices, max_tokens and log "
        "probabilities of its request; more is a 400. A frontend holds them until "
        "they are sent.",
    )
    max_open_answer_bytes: int = Field(
        default=512 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of whole (not streamed) responses of more than 64 KiB that this "
        "frontend holds until they are sent, at least PENSTOCK_MAX_ANSWER_BYTES; more are 503, of "
        "one tenant beyond its share 429.",
    )
    max_queued_jobs: int = Field(
        default=1000, ge=1, le=10_000_000, description="Jobs waiting in the queue; more are 503."
    )
    max_queued_tokens: int = Field(
        default=2_000_000,
        ge=1,
        le=10**12,
        description="Prompt tokens waiting in the queue; more are 503.",
    )
    max_queue_share_per_tenant: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the places in the queue that are its own or free that one tenant may "
        "have, of jobs and of prompt tokens alike; more are 429. The last tenth of the queue is "
        "reserved for tenants that have nothing or little waiting (1/200 of it). The same holds "
        "for what tenants share of a frontend: docs/guides/production.md. 1: neither bound.",
    )
    max_queued_jobs_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Jobs of one tenant waiting in the queue; more are 429. The options of a "
        "key override this setting and the next four for its tenant.",
    )
    max_queued_tokens_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Prompt tokens of one tenant waiting in the queue; more are 429.",
    )
    max_jobs_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Jobs of one tenant waiting or running; more are 429.",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=10**10, description="Jobs of one tenant in a minute; more are 429."
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Tokens of one tenant in a minute, of prompts and outputs; more are 429.",
    )
    request_timeout_s: float = Field(
        default=600.0,
        ge=0.1,
        le=86_400,
        description="Seconds from submit to the end of a job, waiting included.",
    )
    queue_timeout_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Seconds that a job may wait until a worker starts it, if its request does "
        "not set `queue_timeout`; 0: as long as PENSTOCK_REQUEST_TIMEOUT_S. Not for jobs "
        "that continue without a reader.",
    )
    model_retention_s: float = Field(
        default=600.0,
        ge=0,
        le=86_000,
        description="Seconds after the last worker of a model is gone in which requests for it "
        "are still accepted: they wait in the queue for a worker.",
    )
    keep_models: str = Field(
        default="",
        max_length=8192,
        description="Models, separated by commas, whose requests are always accepted once a "
        "worker has announced them: to scale workers from zero.",
    )
    accept_durability: Durability = Field(
        default=Durability.NONE,
        description="What acceptance of a request waits for by default: none, fsync (the job is"
        " in Redis' append-only file on disk; Redis 7.2 or newer), replicas "
        "(PENSTOCK_ACCEPT_REPLICAS of them have it).",
    )
    accept_replicas: int = Field(
        default=1, ge=1, le=16, description="Replicas of Redis that `replicas` waits for."
    )
    accept_timeout_s: float = Field(
        default=5.0,
        ge=0.1,
        le=MAX_ACCEPT_WAIT_S,
        description="Seconds that acceptance waits for this; then the request is a 503.",
    )
    response_ttl_s: float = Field(
        default=3600.0,
        ge=1,
        le=86_400,
        description="Seconds that a stored response is kept after its end, or after its last use "
        "as a previous response.",
    )
    keepalive_s: float = Field(
        default=10.0,
        ge=0.05,
        le=15.0,
        description="Seconds of silence in a stream before a keep-alive comment.",
    )
    write_timeout_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="Seconds without progress after which a client that stopped reading is cut "
        "off; 0: never.",
    )
    outage_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="Seconds that an open stream waits for an unreachable Redis.",
    )
    shutdown_timeout_s: float = Field(
        default=25.0,
        ge=0,
        le=3600,
        description="Seconds that open streams may continue after SIGTERM before they are cut.",
    )
    text_threads: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Threads that render templates and tokenize; of two or more, one takes only "
        "requests of at most 64 KiB.",
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Special tokens that users, tools and assistants write in messages, such as "
        "`<|im_start|>`, are special tokens; else they are ordinary text. Prompts of completions "
        "always have them.",
    )
    max_waiting_text_bytes: int = Field(
        default=64 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of the requests that wait for such a thread, at least 4096 each; "
        "more are 503, and so is a request that waits for longer than 30 seconds.",
    )
    frontend_lease_ms: int = Field(
        default=10_000,
        ge=2000,
        le=600_000,
        description="Milliseconds without a heartbeat after which this frontend's readers count"
        " as disconnected; 20 s more while its connections are open.",
    )
    health_interval_s: float = Field(
        default=0.5,
        ge=0.05,
        le=10,
        description="Seconds between checks of workers, queue and models; /health shows the "
        "last one.",
    )
    cors_origins: str = Field(
        default="",
        max_length=4096,
        description="Origins whose pages may call from a browser, separated by commas; * is any, "
        "app://* is any of the scheme app. default: where there are keys any, else those of this "
        "machine (localhost, 127.0.0.1, [::1]) and of programs (app://, tauri://, "
        "vscode-webview://, every scheme that no web page has); an unset list is default alone. "
        "The server's own pages always may.",
    )
    allowed_hosts: str = Field(
        default="",
        max_length=4096,
        description="Names that requests may have in Host, separated by commas; *.example.com is "
        "every name below example.com, * is any. IP addresses, localhost, PENSTOCK_HOST and "
        "PENSTOCK_PUBLISHED_HOST "
        "are always allowed. Unset: where there are keys any name is.",
    )

    files_dir: str = Field(
        default="",
        max_length=4096,
        description="Directory for the bytes of files, the same disk for all frontends; empty: "
        "this frontend has no files and runs no batches.",
    )
    max_file_bytes: int = Field(
        default=512 * 2**20,
        ge=1024,
        le=2**40,
        description="Bytes of one uploaded file; more is a 413.",
    )
    max_files: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Files stored, outputs of batches included; no uploads beyond that (503).",
    )
    max_files_bytes: int = Field(
        default=64 * 2**30,
        ge=1024,
        le=2**50,
        description="Bytes of all files stored; no uploads beyond that (503).",
    )
    max_files_per_tenant: int = Field(
        default=1000, ge=1, le=1_000_000, description="Files of one tenant; then 403 to uploads."
    )
    max_files_bytes_per_tenant: int = Field(
        default=16 * 2**30,
        ge=1024,
        le=2**50,
        description="Bytes of one tenant's files; then 403 to uploads.",
    )
    file_life_s: int = Field(
        default=30 * 86_400,
        ge=60,
        le=90 * 86_400,
        description="Seconds that a file is kept, if its upload sets no expiry, and the record "
        "of a batch after its end.",
    )
    max_open_batches: int = Field(
        default=1000,
        ge=1,
        le=1000,
        description="Batches that have not ended; then 503 to new ones.",
    )
    max_open_batches_per_tenant: int = Field(
        default=100,
        ge=1,
        le=1000,
        description="Batches of one tenant that have not ended; then 429 to new ones.",
    )
    max_batch_rows: int = Field(
        default=1_000_000,
        ge=1,
        le=10_000_000,
        description="Requests in one batch; 20 bytes each while it is validated.",
    )
    batches_at_once: int = Field(
        default=16,
        ge=0,
        le=256,
        description="Batches that this frontend runs at once; 0: none.",
    )
    batch_rows_in_flight: int = Field(
        default=256,
        ge=1,
        le=2048,
        description="Requests of one batch in the queue or running at once.",
    )

    api_keys: str = Field(
        default="",
        max_length=4 * 2**20,
        repr=False,
        description="Lines of `python -m api.keys`, separated by line breaks or semicolons. "
        "Without any, and without PENSTOCK_API_KEYS_FILE, requests need no key.",
    )
    api_keys_file: str = Field(
        default="",
        max_length=4096,
        description="A file of such lines; it is read again when it changes.",
    )
    allow_without_keys: bool = Field(
        default=False,
        description="Serve any client that can reach the port, on any address, without keys.",
    )
    metrics_key: str = Field(
        default="",
        max_length=512,
        repr=False,
        description="The bearer token of GET /metrics and /metrics/deployment; empty: an API key, "
        "if keys are configured.",
    )
    monitoring_without_keys: bool = Field(
        default=False,
        description="Serve the metrics, which name tenants, (without PENSTOCK_METRICS_KEY) and the "
        "whole of GET /health without a key, if keys are configured.",
    )
    stream_token_s: int = Field(
        default=600,
        ge=1,
        le=3600,
        description="Seconds that a token in the URL of a job's stream is valid.",
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
