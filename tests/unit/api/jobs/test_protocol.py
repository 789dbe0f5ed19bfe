"""Jobs as HTTP shows them: public ids and statuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from api.ids import parse_job_id, public_id
from api.jobs.protocol import JobListQuery, JobObject
from shared.keys import new_job_id
from shared.messages import JobState
from tests.unit.api.jobs.relay_fakes import record_of


def test_public_ids_lead_back_to_the_job() -> None:
    job_id = new_job_id()
    for kind in ("chat", "completion", "generate", "unheard-of"):
        assert parse_job_id(public_id(kind, job_id)) == job_id
    for text in ("", "x", "chatcmpl-", "0-", "0-a b", "-1-x", "0-" + "a" * 100, "0-é"):
        assert parse_job_id(text) is None


def test_status_words_are_those_of_http() -> None:
    words = {
        state: JobObject.of(record_of(state), {}).model_dump(mode="json")["status"]
        for state in JobState
    }
    assert set(words.values()) == {
        "queued", "running", "finished", "failed", "cancelled", "expired",
    }  # fmt: skip
    assert all(
        JobListQuery.model_validate({"state": word}).state is state for state, word in words.items()
    )
    with pytest.raises(ValidationError):
        JobListQuery.model_validate({"state": "done"})
