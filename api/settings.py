"""ApiSettings: every variable of the frontend, with its unit and bounds."""

from __future__ import annotations

from pydantic import Field, field_validator

from shared.settings import SharedSettings


class ApiSettings(SharedSettings):
    """Read once by `api.__main__`."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes any free one.")

    max_body_bytes: int = Field(
        default=4 * 2**20,
        ge=1024,
        le=256 * 2**20,
        description="Bytes of a request body; more is answered 413.",
    )
    body_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds that a request body may take to arrive."
    )
    max_open_requests: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Answers being generated or tailed at once by this frontend; more are 503.",
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
    max_queued_jobs_per_tenant: int = Field(
        default=1000,
        ge=1,
        le=10_000_000,
        description="Jobs of one tenant waiting in the queue; more are 429.",
    )
    request_timeout_s: float = Field(
        default=600.0,
        ge=0.1,
        le=86_400,
        description="Seconds from submit to the end of a job, waiting included.",
    )
    keepalive_s: float = Field(
        default=10.0,
        ge=0.05,
        le=15.0,
        description="Seconds of silence in a stream before a keep-alive comment.",
    )
    outage_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="Seconds that an open stream waits for a Redis that went away.",
    )
    shutdown_timeout_s: float = Field(
        default=25.0,
        ge=0,
        le=3600,
        description="Seconds that open streams may go on after SIGTERM before they are cut.",
    )
    text_threads: int = Field(
        default=2, ge=1, le=64, description="Threads that render templates and tokenize."
    )
    max_waiting_texts: int = Field(
        default=256,
        ge=1,
        le=100_000,
        description="Requests waiting for such a thread; more are answered 503.",
    )
    frontend_lease_ms: int = Field(
        default=10_000,
        ge=2000,
        le=600_000,
        description="Milliseconds without a beat until this frontend's readers count as gone.",
    )
    health_interval_s: float = Field(
        default=0.5,
        ge=0.05,
        le=10,
        description="Seconds between looks at workers, queue and models; /health shows the last.",
    )
    cors_origins: str = Field(
        default="*",
        max_length=4096,
        description="Origins that browsers may call from, separated by commas; * is any.",
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in value.split(","):
            name = origin.strip()
            if name not in ("", "*") and not name.startswith(("http://", "https://")):
                raise ValueError("each origin is * or begins with http:// or https://")
        return value

    @property
    def allowed_origins(self) -> frozenset[str]:
        """Origins as browsers send them; {"*"} for any."""
        names = (origin.strip().rstrip("/") for origin in self.cors_origins.split(","))
        return frozenset(name for name in names if name)
