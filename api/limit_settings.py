"""LimitSettings: what one frontend and one tenant may take of the deployment."""

from __future__ import annotations

from pydantic import Field

from shared.settings import SharedSettings, symptom


class LimitSettings(SharedSettings):
    """Bounds of requests, of the queue, and of files and batches."""

    max_body_bytes: int = Field(
        default=4 * 2**20,
        ge=1024,
        le=256 * 2**20,
        description="Bytes of a request body; more is a 413.",
        json_schema_extra=symptom("Clients with long prompts get 413."),
    )
    max_open_body_bytes: int = Field(
        default=256 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of request bodies that this frontend receives at once, until they are "
        "parsed, at least twice PENSTOCK_MAX_BODY_BYTES; more are 503, of one tenant beyond its "
        "share 429.",
        json_schema_extra=symptom(
            "Large requests get 503, or the frontend exceeds its memory limit."
        ),
    )
    body_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds in which a request body must arrive.",
        json_schema_extra=symptom("Clients on slow links get 408."),
    )
    max_open_requests: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Responses generated or streamed at once by this frontend; more are 503.",
        json_schema_extra=symptom(
            "A frontend answers 503 with memory to spare, or exceeds its memory limit."
        ),
    )
    max_answer_bytes: int = Field(
        default=64 * 2**20,
        ge=1024,
        le=2**40,
        description="Bytes of one whole response, estimated from choices, max_tokens and log "
        "probabilities of its request; more is a 400. A frontend holds them until "
        "they are sent.",
        json_schema_extra=symptom("Requests with many choices or log probabilities get 400."),
    )
    max_open_answer_bytes: int = Field(
        default=512 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of whole (not streamed) responses of more than 64 KiB that this "
        "frontend holds until they are sent, at least PENSTOCK_MAX_ANSWER_BYTES; more are 503, of "
        "one tenant beyond its share 429.",
        json_schema_extra=symptom(
            "Answers without streaming get 503, or the frontend exceeds its memory limit."
        ),
    )
    max_queued_jobs: int = Field(
        default=1000,
        ge=1,
        le=10_000_000,
        description="Jobs waiting in the queue; more are 503.",
        json_schema_extra=symptom("Bursts get 503, or requests wait too long in the queue."),
    )
    max_queued_tokens: int = Field(
        default=2_000_000,
        ge=1,
        le=10**12,
        description="Prompt tokens waiting in the queue; more are 503.",
        json_schema_extra=symptom("Bursts of long prompts get 503, or Redis uses too much memory."),
    )
    max_queue_share_per_tenant: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the places in the queue that are its own or free that one tenant may "
        "have, of jobs and of prompt tokens alike; more are 429. The last tenth of the queue is "
        "reserved for tenants that have nothing or little waiting (1/200 of it). The same holds "
        "for what tenants share of a frontend: docs/guides/operate/secure.md. 1: neither bound.",
        json_schema_extra=symptom(
            "One tenant fills the queue, or a single tenant gets 429 with places left."
        ),
    )
    max_queued_jobs_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Jobs of one tenant waiting in the queue; more are 429. The options of a "
        "key override this setting and the next four for its tenant.",
        json_schema_extra=symptom("The requests of one tenant delay those of others."),
    )
    max_queued_tokens_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Prompt tokens of one tenant waiting in the queue; more are 429.",
        json_schema_extra=symptom("The long prompts of one tenant delay the requests of others."),
    )
    max_jobs_per_tenant: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Jobs of one tenant waiting or running; more are 429.",
        json_schema_extra=symptom("One tenant occupies all workers."),
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Jobs of one tenant in a minute; more are 429.",
        json_schema_extra=symptom("One tenant sends more requests than it pays for."),
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10**10,
        description="Tokens of one tenant in a minute, of prompts and outputs; more are 429.",
        json_schema_extra=symptom("One tenant uses more tokens than it pays for."),
    )
    request_timeout_s: float = Field(
        default=600.0,
        ge=0.1,
        le=86_400,
        description="Seconds from submit to the end of a job, waiting included.",
        json_schema_extra=symptom(
            "Long answers end with `deadline_exceeded`, or abandoned jobs run too long."
        ),
    )
    queue_timeout_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Seconds that a job may wait until a worker starts it, if its request does "
        "not set `queue_timeout`; 0: as long as PENSTOCK_REQUEST_TIMEOUT_S. Not for jobs "
        "that continue without a reader.",
        json_schema_extra=symptom("Clients prefer an early error to a late answer."),
    )
    max_waiting_text_bytes: int = Field(
        default=64 * 2**20,
        ge=4096,
        le=2**40,
        description="Bytes of the requests that wait for one of PENSTOCK_TEXT_THREADS, at least "
        "4096 each; more are 503, and so is a request that waits for longer than 30 seconds.",
        json_schema_extra=symptom("Bursts of long prompts get 503 `server_overloaded`."),
    )
    max_file_bytes: int = Field(
        default=512 * 2**20,
        ge=1024,
        le=2**40,
        description="Bytes of one uploaded file; more is a 413.",
        json_schema_extra=symptom("Uploads get 413."),
    )
    max_files: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Files stored, outputs of batches included; no uploads beyond that (503).",
        json_schema_extra=symptom("Uploads get 503 with space on the disk."),
    )
    max_files_bytes: int = Field(
        default=64 * 2**30,
        ge=1024,
        le=2**50,
        description="Bytes of all files stored; no uploads beyond that (503).",
        json_schema_extra=symptom("Uploads get 503 with space on the disk, or files fill it."),
    )
    max_files_per_tenant: int = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description="Files of one tenant; then 403 to uploads.",
        json_schema_extra=symptom("Uploads of one tenant get 403."),
    )
    max_files_bytes_per_tenant: int = Field(
        default=16 * 2**30,
        ge=1024,
        le=2**50,
        description="Bytes of one tenant's files; then 403 to uploads.",
        json_schema_extra=symptom("Uploads of one tenant get 403, or its files fill the disk."),
    )
    max_open_batches_per_tenant: int = Field(
        default=100,
        ge=1,
        le=1000,
        description="Batches of one tenant that have not ended; then 429 to new ones.",
        json_schema_extra=symptom("New batches of one tenant get 429."),
    )
    batches_at_once: int = Field(
        default=16,
        ge=0,
        le=256,
        description="Batches that this frontend runs at once; 0: none.",
        json_schema_extra=symptom("Batches wait for each other, or a frontend should run none."),
    )
    batch_rows_in_flight: int = Field(
        default=256,
        ge=1,
        le=2048,
        description="Requests of one batch in the queue or running at once.",
        json_schema_extra=symptom("Batches leave workers idle, or delay interactive requests."),
    )
