"""OpenAI's SDK for Node, and the AI SDK, against a running service."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shared.messages import ErrorCode, JobState, Usage
from shared.transport.ports.queue import JobEnd
from tests.support.node import NodeProgram, node_says
from tests.support.running_service import MODEL, RunningService, wait_until

pytestmark = [pytest.mark.node, pytest.mark.packages]

SHORT = {"max_tokens": 40, "ignore_eos": True}
LONG = {"max_tokens": 400, "ignore_eos": True}


def says(service: RunningService, case: str, **options: Any) -> Any:
    return node_says("openai_cases", service.base_url, case, MODEL, json.dumps(options or SHORT))


def job_of(service: RunningService) -> dict[str, Any]:
    """The newest job, as the service tells it."""
    jobs = httpx.get(f"{service.base_url}/v1/jobs?limit=1").json()["data"]
    return dict(jobs[0]) if jobs else {}


def test_a_stream_is_the_whole_answer_in_pieces(service: RunningService) -> None:
    whole, chunks = says(service, "whole"), says(service, "stream")
    assert whole["id"] == whole["request_id"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
    assert text == whole["choice"]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choice"]["finish_reason"] == "length"
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_the_stream_helper_and_the_older_route(service: RunningService) -> None:
    result = says(service, "helper")
    assert result["seen"] == result["content"] != ""
    assert result["id"].startswith("chatcmpl-")
    result = says(service, "completions", max_tokens=9)
    assert result["streamed"] == result["whole"] != ""


def test_responses_and_models(service: RunningService) -> None:
    result = says(service, "responses", **{"max_tokens": 20})
    assert result["streamed"] == result["whole"] != ""
    assert result["numbers"] == list(range(len(result["numbers"])))
    assert says(service, "models") == {"ids": [MODEL], "retrieved": MODEL}


def test_breaking_out_of_the_loop_cancels_the_job(service: RunningService) -> None:
    service.script.step_s = 0.05
    with NodeProgram(
        "openai_cases", service.base_url, "breaks", MODEL, json.dumps(LONG)
    ) as program:
        result = program.heard()
        assert result["chunks"] == 4
        service.until_job_is(result["id"], "cancelled")
        program.cue()
    wait_until(lambda: not service.worker.jobs, "the worker to drop it")


@pytest.mark.promise(
    "Clients: Node's SDK and the AI SDK stream, break off, abort in every state and run tools"
)
@pytest.mark.parametrize("form", ["stream", "whole"])
@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_an_abort_cancels_the_job_wherever_it_is(
    service: RunningService,
    state: str,
    form: str,
) -> None:
    service.hold_jobs_in(state)
    before = service.job_ids()
    with NodeProgram(
        "openai_cases", service.base_url, f"abort_{form}", MODEL, json.dumps(LONG)
    ) as program:
        assert program.heard() == "begun"
        job_id = service.until_job_in(state, before)
        program.cue()
        result = program.heard()
        if form == "whole":
            assert result["error"]["class"] == "APIUserAbortError"
        else:
            assert result["error"] is None  # the loop just ends
        service.until_disconnected(job_id)
        program.cue()


def test_errors_become_the_sdk_s_own(service: RunningService) -> None:
    result = says(service, "errors")
    bad = result["bad"]
    assert (bad["class"], bad["status"], bad["param"]) == ("BadRequestError", 400, "temperature")
    assert bad["type"] == "invalid_request_error"
    assert bad["requestID"].startswith("chatcmpl-")
    assert {**result["badStream"], "requestID": ""} == {**bad, "requestID": ""}
    assert result["isBad"]
    assert (result["unknown"]["class"], result["unknown"]["code"]) == (
        "NotFoundError",
        "model_not_found",
    )
    assert result["long"]["code"] == "context_length_exceeded"
    assert result["nowhere"]["code"] == "not_found"


def test_a_job_that_fails_is_raised_streamed_and_whole(service: RunningService) -> None:
    service.script.stop_after = 3
    service.script.end = JobEnd(
        JobState.FAILED, ErrorCode.ENGINE_ERROR, Usage(5, 3), message="the step failed"
    )
    result = says(service, "fails")
    assert result["chunks"] >= 2
    assert result["streamed"]["class"] == "APIError"
    assert result["streamed"]["code"] == "engine_error"
    assert "the step failed" in result["streamed"]["message"]
    assert (result["whole"]["class"], result["whole"]["status"]) == ("InternalServerError", 500)


def test_the_ai_sdk_generates_and_streams(service: RunningService) -> None:
    result = node_says("ai_cases", service.base_url, "text", MODEL)
    assert result["text"] == result["whole"] != ""
    assert len(set(result["reasons"])) == 1
    assert result["usage"][0] == result["usage"][1] > 0
    result = node_says("ai_cases", service.base_url, "errors", MODEL)
    assert (result["name"], result["status"]) == ("AI_APICallError", 404)
    assert "nobody" in result["message"]


def test_the_ai_sdk_s_abort_cancels_the_job(service: RunningService) -> None:
    service.script.step_s = 0.05
    kinds = node_says("ai_cases", service.base_url, "abort", MODEL)
    assert "abort" in kinds
    wait_until(lambda: job_of(service)["status"] == "cancelled", "the cancel", 60)
