"""What batches may take of a limit: half of it, so that the other half is for those who wait."""

from __future__ import annotations

from dataclasses import fields, replace

from shared.transport.base import AdmissionLimits


def batch_share(limits: AdmissionLimits, prompt_tokens: int) -> AdmissionLimits:
    """Half of every bound; a tenant's share is then one of that half. A prompt that is larger than
    its share waits for an empty queue."""
    found = {field.name: getattr(limits, field.name) for field in fields(limits)}
    halves = {name: max(1, bound // 2) for name, bound in found.items() if isinstance(bound, int)}
    for name in ("max_queued_tokens", "max_queued_tokens_per_tenant"):
        if name in halves:
            halves[name] = max(halves[name], prompt_tokens)
    return replace(limits, **halves)
