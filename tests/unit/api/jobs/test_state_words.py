"""A job's states have one set of words: in the store, the API, the metrics, the pages, the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from api.jobs.protocol import JobListQuery, JobObject
from shared.messages import TERMINAL_STATES, JobState
from tests.support.api_document import api_document, operations
from tests.support.launched import REPOSITORY
from tests.unit.api.jobs.relay_fakes import record_of

STATES, ENDS = set(map(str, JobState)), set(map(str, TERMINAL_STATES))


def words_in(path: str, pattern: str, word: str) -> set[str]:
    found = re.search(pattern, (Path(REPOSITORY) / path).read_text(), re.DOTALL)
    assert found is not None, (path, pattern)
    return set(re.findall(word, found[1]))


@pytest.mark.parametrize("state", JobState)
def test_the_api_says_a_state_as_the_store_does(state: JobState) -> None:
    assert JobObject.of(record_of(state), {}).model_dump(mode="json")["status"] == state.value
    assert JobListQuery.model_validate({"state": state.value}).state is state


def test_the_word_of_earlier_releases_still_finds_its_jobs() -> None:
    assert JobListQuery.model_validate({"state": "completed"}).state is JobState.FINISHED
    with pytest.raises(ValidationError, match="finished"):
        JobListQuery.model_validate({"state": "done"})


def test_the_document_has_these_words() -> None:
    parameters = dict(operations())["GET /v1/jobs"]["parameters"]
    state = next(one for one in parameters if one["name"] == "state")
    schemas = api_document()["components"]["schemas"]
    assert state["schema"] == {"$ref": "#/components/schemas/JobState"}
    assert set(schemas["JobState"]["enum"]) == STATES
    assert schemas["JobObject"]["properties"]["status"] == state["schema"]


def test_scripts_pages_and_docs_have_these_words() -> None:
    scripts = words_in(
        "shared/transport/lua/lib/common.lua", r"TERMINAL = \{(.*?)\}", r"(\w+) = true"
    )
    assert scripts == ENDS
    assert words_in("api/static/job_state.js", r"KINDS = \{(.*?)\}", r"(\w+):") == STATES
    assert words_in("docs/WIRE.md", r"\n\| `state` \|(.*?)by `release`", r"`(\w+)`") == STATES
    assert words_in("docs/GLOSSARY.md", r"\n\| state \|(.*?)\n", r"`(\w+)`") == STATES
