"""The release after this one, as far as others can tell: `become(schema)` in its processes.

It queues jobs of its own schema version, and puts what today's release has never seen into all that
it writes: a member of the stored job, a field of the job's hash and of each log entry, a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_STARTED = "redis.call(PUBLISH, P .. 'ch:' .. id, 'S|'"
NEWS = (
    # What today's transitions say, and what the next release says instead.
    ("add(id, at, 't'", "add(id, at, 'news', 'x', 't'"),
    ("'HSET', job_key, 'state', 'running',", "'HSET', job_key, 'news', 'x', 'state', 'running',"),
    (_STARTED, _STARTED.replace("'S|'", "'Z|news'); ") + _STARTED),
)


def become(schema: int) -> None:
    """In this process, before it imports the transport."""
    from shared.transport import scripts
    from shared.transport import wire as codec

    load = scripts.load_sources
    codec.encode_job = _with_a_member(codec.encode_job)
    codec.SCHEMA_VERSION = schema  # type: ignore[misc]

    def load_next(**options: Any) -> Mapping[str, str]:
        return renewed(load(**options), schema)

    scripts.load_sources = load_next


def renewed(sources: Mapping[str, str], schema: int) -> Mapping[str, str]:
    """Today's transitions in the next release's words."""
    old = f"local SCHEMA_VERSION = {schema - 1} "
    assert all(old in source for source in sources.values()), "the schema's line was not found"
    texts = {
        name: text.replace(old, f"local SCHEMA_VERSION = {schema} ")
        for name, text in sources.items()
    }
    for today, tomorrow in NEWS:
        assert any(today in text for text in texts.values()), f"not found: {today}"
        texts = {name: text.replace(today, tomorrow) for name, text in texts.items()}
    return texts


def _with_a_member(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def encode_next(job: Any) -> bytes:
        return encode(job).removesuffix(b"}") + b',"news":{"x":1}}'

    return encode_next
