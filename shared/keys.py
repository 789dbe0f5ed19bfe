"""The names of every key and channel: the one place that builds them.

All keys but one carry the same hash tag, so they live in one slot and every transition is atomic in
a cluster too. The namespace, not the database number, separates
deployments: pub/sub ignores databases.
"""

from __future__ import annotations

import os
import re
import time
import uuid

NAMESPACE = "penstock"
NUM_LANES = 8
GROUP = "w"

_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Keys:
    """Names of a deployment's keys and channels, such as `penstock:{p0}:job:<id>` (WIRE.md)."""

    def __init__(self, namespace: str = NAMESPACE) -> None:
        """Raises ValueError for a namespace that would break the hash tag."""
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(
                f"a namespace has 1 to 64 letters, digits, '_', '.' or '-': {namespace[:80]!r}"
            )
        self.namespace = namespace
        self.meta = f"{namespace}:meta"  # schema version and birth; the one key without the tag
        self.prefix = prefix = f"{namespace}:{{p0}}:"
        self.files = f"{prefix}files"
        self.files_bytes = f"{prefix}files_bytes"
        self.blobs_gone = f"{prefix}blobs_gone"  # files to be removed from the disk
        self.batches_open = f"{prefix}batches_open"
        self.live = f"{prefix}live"
        self.queued_deadlines = f"{prefix}unbegun"  # of jobs that were never claimed
        self.workers = f"{prefix}workers"
        self.offers = f"{prefix}offers"  # worker -> the models that it can load
        self.paused = f"{prefix}paused"  # model -> since when, and by whom its queue is paused
        self.absent = f"{prefix}absent"  # never written: see Scripts
        self.stat = f"{prefix}stat"
        self.held = f"{prefix}held"  # tenant -> bytes in Redis
        self.cpu = f"{prefix}cpu"  # tenant -> microseconds of processors
        self.refused = f"{prefix}refused"  # tenant -> requests that were refused
        self.pulse = f"{prefix}pulse"
        self.dead_letters = f"{prefix}dlq"
        self.prompts = f"{prefix}prompts"  # ids of ended jobs whose prompts are kept
        self.models = f"{prefix}models"
        self.models_seen = f"{prefix}models_seen"
        self.models_kept = f"{prefix}models_kept"

    def queue(self, model: str, lane: int) -> str:
        if not 0 <= lane < NUM_LANES:
            raise ValueError(f"a lane is between 0 and {NUM_LANES - 1}: {lane}")
        return f"{self.prefix}q:{model}:{lane}"

    def queues(self, model: str) -> tuple[str, ...]:
        """Returns all lanes of a model, the first lane at the front."""
        return tuple(self.queue(model, lane) for lane in range(NUM_LANES))

    def job(self, job_id: str) -> str:
        return f"{self.prefix}job:{job_id}"

    def request(self, job_id: str) -> str:
        return f"{self.prefix}req:{job_id}"

    def prompt(self, job_id: str) -> str:
        return f"{self.prefix}prompt:{job_id}"

    def log(self, job_id: str) -> str:
        return f"{self.prefix}log:{job_id}"

    def request_record(self, job_id: str) -> str:
        return f"{self.prefix}facts:{job_id}"

    def part(self, digest: str) -> str:
        return f"{self.prefix}part:{digest}"

    def tombstone(self, job_id: str) -> str:
        return f"{self.prefix}tombstone:{job_id}"

    def channel(self, job_id: str) -> str:
        return f"{self.prefix}ch:{job_id}"

    def control(self, worker_id: str) -> str:
        return f"{self.prefix}ctl:{worker_id}"

    def worker(self, worker_id: str) -> str:
        return f"{self.prefix}w:{worker_id}"

    def prefixes(self, worker_id: str) -> str:
        return f"{self.prefix}prefixes:{worker_id}"

    def order(self, worker_id: str) -> str:
        return f"{self.prefix}order:{worker_id}"

    def probe(self, worker_id: str) -> str:
        return f"{self.prefix}probe:{worker_id}"

    def frontend(self, frontend_id: str) -> str:
        return f"{self.prefix}f:{frontend_id}"

    def reports(self, kind: str) -> str:
        """Returns the index of the processes of a kind ("frontend", "loading") that report."""
        return f"{self.prefix}{kind}s"

    def report(self, kind: str, process_id: str) -> str:
        return f"{self.prefix}{kind}:{process_id}"

    def history(self, slot: int) -> str:
        return f"{self.prefix}history:{slot}"

    def history_of_day(self, slot: int) -> str:
        return f"{self.prefix}history:day:{slot}"

    def tenant(self, tenant: str) -> str:
        return f"{self.prefix}tenant:{tenant}"

    def secret(self, purpose: str) -> str:
        return f"{self.prefix}secret:{purpose}"

    def work(self, model: str) -> str:
        return f"{self.prefix}work:{model}"

    def limit(self, tenant: str) -> str:
        return f"{self.prefix}limit:{tenant}"

    def idempotency(self, digest: str) -> str:
        return f"{self.prefix}idem:{digest}"

    def blob(self, digest: str) -> str:
        return f"{self.prefix}blob:{digest}"

    def ended(self, state: str) -> str:
        return f"{self.prefix}ended:{state}"

    def ended_of(self, tenant: str) -> str:
        """Returns the index of one tenant's ended jobs, of every state."""
        return f"{self.prefix}ended:tenant:{tenant}"

    def file(self, file_id: str) -> str:
        return f"{self.prefix}file:{file_id}"

    def files_of(self, tenant: str) -> str:
        return f"{self.prefix}files:{tenant}"

    def batch(self, batch_id: str) -> str:
        return f"{self.prefix}batch:{batch_id}"

    def batches_of(self, tenant: str) -> str:
        return f"{self.prefix}batches:{tenant}"

    def listed(self, state: str, tenant: str | None = None) -> str:
        """Returns the index of "queued" or "running" jobs: of all tenants, or of one."""
        return f"{self.prefix}{state}" + ("" if tenant is None else f":tenant:{tenant}")

    def queued_for(self, model: str) -> str:
        return f"{self.prefix}queued:model:{model}"

    def dead_letter(self, job_id: str) -> str:
        return f"{self.prefix}dead:{job_id}"


# Job ids: "0-<uuid>", see WIRE.md. Any process derives every key of a job from its id alone.

_JOB_ID = re.compile(r"0-[0-9A-Za-z_-]{1,64}")
_ID_PART = re.compile(r"[0-9A-Za-z_-]{1,66}")


def new_job_id() -> str:
    """Returns a new id. Ids made later sort later (to the millisecond)."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7 (RFC 9562, section 5.7)
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return f"0-{uuid.UUID(int=value)}"


def is_job_id(text: str) -> bool:
    """Returns whether `text` can be a job id."""
    return _JOB_ID.fullmatch(text) is not None


def is_id_part(text: str) -> bool:
    """Returns whether a job id can begin or end with `text`."""
    return _ID_PART.fullmatch(text) is not None


def is_id(text: str, prefix: str) -> bool:
    """Returns whether `text` can be an id with this prefix, such as a file's or a batch's."""
    return text.startswith(prefix) and is_job_id(text.removeprefix(prefix))
