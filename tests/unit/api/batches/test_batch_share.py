"""Batches take half of every limit, and no row waits for ever for a place that cannot be."""

from __future__ import annotations

from dataclasses import asdict

from api.batches.row import batch_share
from shared.transport.ports.jobs import AdmissionLimits


def test_half_of_every_bound_is_left_to_others() -> None:
    limits = AdmissionLimits(
        max_queued_jobs=11,
        max_queued_tokens=1000,
        max_queue_share_per_tenant=0.75,
        max_queued_jobs_per_tenant=1,
        max_queued_tokens_per_tenant=500,
        max_jobs_per_tenant=8,
        requests_per_minute=None,
        tokens_per_minute=600,
    )
    assert asdict(batch_share(limits, 10)) == asdict(
        AdmissionLimits(
            max_queued_jobs=5,
            max_queued_tokens=500,
            max_queue_share_per_tenant=0.75,
            max_queued_jobs_per_tenant=1,
            max_queued_tokens_per_tenant=250,
            max_jobs_per_tenant=4,
            requests_per_minute=None,
            tokens_per_minute=300,
        )
    )


def test_a_prompt_larger_than_its_share_fits_an_empty_queue() -> None:
    share = batch_share(AdmissionLimits(max_queued_tokens=1000), 900)
    assert (share.max_queued_tokens, share.max_queued_tokens_per_tenant) == (900, None)
