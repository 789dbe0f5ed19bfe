"""Paths as clients write them: with a slash behind, and vLLM's own."""

from __future__ import annotations

from importlib.metadata import version

import httpx
import pytest
from openai import OpenAI

from tests.support.running_service import MODEL, RunningService


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/jobs", "/v1/files"])
def test_a_trailing_slash_changes_nothing(client: httpx.Client, path: str) -> None:
    without, behind = client.get(path), client.get(path + "/")
    assert behind.status_code == without.status_code
    assert behind.json().keys() == without.json().keys()
    assert not behind.history


def test_a_query_arrives_at_a_path_with_a_slash(client: httpx.Client) -> None:
    answer = client.get("/v1/models/?limit=1", headers={"anthropic-version": "2023-06-01"})
    assert "has_more" in answer.json()


def test_two_slashes_are_another_path(client: httpx.Client) -> None:
    assert client.get("/v1/jobs//").status_code == 404
    assert client.get("/v1/").status_code == 404
    assert client.get("//v1/jobs").status_code == 404


def test_a_base_url_with_a_slash_serves_the_sdk(service: RunningService) -> None:
    with OpenAI(base_url=f"{service.base_url}/v1/", api_key="none", max_retries=0) as sdk:
        assert [model.id for model in sdk.models.list()] == [MODEL]


def test_the_version_is_reported_as_vllm_does(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": version("penstock")}
