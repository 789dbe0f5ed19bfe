"""Files and batches as users of the OpenAI SDK know them, against a real app and worker."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from openai.types.responses import Response

from tests.support.running_service import MODEL, RunningService, wait_until
from tests.support.service_fixtures import module_service, openai_client

LIMIT_S = 60.0
MAX_FILE_BYTES = 300_000

shared_service = module_service(
    max_file_bytes=MAX_FILE_BYTES,
    max_body_bytes=20_000,
    max_files_per_tenant=100,
    batch_rows_in_flight=8,
)
client = openai_client


def row(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    params = {"model": MODEL, "prompt": f"row {custom_id} ", "max_tokens": 8, "seed": 1}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": params | body}


def lines_of(*rows: dict[str, Any] | bytes) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)


def upload(client: OpenAI, content: bytes) -> str:
    return client.files.create(file=("rows.jsonl", content), purpose="batch").id


def begin(client: OpenAI, *rows: dict[str, Any] | bytes, **more: Any) -> Batch:
    params: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    return client.batches.create(input_file_id=upload(client, lines_of(*rows)), **(params | more))


def ended(client: OpenAI, batch_id: str) -> Batch:
    over = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch_id).status in over, "its end", LIMIT_S)
    return client.batches.retrieve(batch_id)


def content(client: OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """Lines of an output or error file by their custom_id, each of which must be there once."""
    assert file_id is not None
    read = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in read}
    assert len(by_id) == len(read)
    return by_id


@pytest.mark.promise(
    "Batches: the SDK uploads, creates, waits and reads the responses; each is that of its own "
    "route"
)
def test_a_batch_from_upload_to_answers(client: OpenAI, service: RunningService) -> None:
    rows = [row(f"r{index}", prompt=f"number {index} ") for index in range(50)]
    batch = begin(client, *rows, metadata={"run": "7"})
    assert batch.status == "validating"
    assert batch.metadata == {"run": "7"}
    batch = ended(client, batch.id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 50, "completed": 50, "failed": 0}
    assert batch.model == MODEL
    answers = content(client, batch.output_file_id)
    assert set(answers) == {f"r{index}" for index in range(50)}
    for index in range(50):
        answer = answers[f"r{index}"]
        direct = client.completions.create(**rows[index]["body"])
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert answer["response"]["request_id"] == body["id"]
        assert body["choices"] == json.loads(direct.to_json())["choices"]
        assert body["usage"] == json.loads(direct.to_json())["usage"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == 50 * 8
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is not None
    assert batch.completed_at is not None
    assert batch.expires_at == batch.created_at + 86_400


def test_rows_of_chat_and_responses_are_checked_as_their_routes_are(client: OpenAI) -> None:
    chat = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": MODEL,
            "messages": [{"role": "user", "content": "héllo 😀"}],
            "max_tokens": 5,
        },
    }
    batch = ended(client, begin(client, chat, endpoint="/v1/chat/completions").id)
    body = content(client, batch.output_file_id)["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    params = {"model": MODEL, "input": "héllo", "max_output_tokens": 5}
    response = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": params}
    batch = ended(client, begin(client, response, endpoint="/v1/responses").id)
    body = content(client, batch.output_file_id)["a"]["response"]["body"]
    assert body["object"] == "response"
    assert client.responses.retrieve(body["id"]).id == body["id"]  # stored, as ever


def test_a_row_that_its_route_would_refuse_is_in_the_error_file(client: OpenAI) -> None:
    rows = [
        row("good"),
        row("hot", temperature=9),
        row("long", prompt="abc " * 3000),
        row("nobody", model="nobody/nothing"),
        row("unknown", nonsense=1),
        row("streamed", stream=True),
        row("hasty", queue_timeout=5),
    ]
    batch = ended(client, begin(client, *rows).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 7, "completed": 1, "failed": 6}
    assert batch.model is None
    assert set(content(client, batch.output_file_id)) == {"good"}
    refused = {
        name: (line["response"]["status_code"], line["response"]["body"]["error"])
        for name, line in content(client, batch.error_file_id).items()
    }
    assert {name: status for name, (status, _) in refused.items()} == {
        "hot": 400,
        "long": 400,
        "nobody": 404,
        "unknown": 400,
        "streamed": 400,
        "hasty": 400,
    }
    assert refused["hot"][1]["param"] == "temperature"
    assert refused["long"][1]["code"] == "context_length_exceeded"
    assert refused["unknown"][1]["code"] == "unsupported_parameter"
    assert refused["hasty"][1]["param"] == "queue_timeout"


def test_a_row_lists_its_ignored_members(client: OpenAI) -> None:
    def response(custom_id: str, **members: Any) -> dict[str, Any]:
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 3, **members}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": body}

    sent: dict[str, Any] = {"truncation": "auto", "include": ["reasoning.encrypted_content"]}
    rows = [response("agent", **sent), response("plain"), response("hot", temperature=9, **sent)]
    batch = ended(client, begin(client, *rows, endpoint="/v1/responses").id)
    raw = client.responses.with_raw_response.create(**rows[0]["body"])
    received = set(raw.headers["x-penstock-ignored"].split(", "))
    assert received == {"truncation", "include"}
    answered = content(client, batch.output_file_id)
    for line in (answered["agent"], content(client, batch.error_file_id)["hot"]):
        assert list(line["response"]["headers"]) == ["x-penstock-ignored"]
        assert set(line["response"]["headers"]["x-penstock-ignored"].split(", ")) == received
    assert set(answered["plain"]["response"]) == {"status_code", "request_id", "body"}
    for line in answered.values():
        made = Response.model_validate(line["response"]["body"])
        assert made.id == line["response"]["request_id"]
        assert made.output_text == raw.parse().output_text


@pytest.mark.promise(
    "Batches: errors of the input are reported by line; errors of a row in its place"
)
def test_a_file_with_bad_lines_fails_and_names_them(
    client: OpenAI, service: RunningService
) -> None:
    rows = [
        row("a"),
        b"{nonsense",
        b"",
        row("a"),
        row("c") | {"url": "/v1/embeddings"},
        row("d") | {"method": "GET"},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions"},
        row("") | {"custom_id": 7},
        b'"text"',
        row("x" * 600),
        row("f") | {"more": 1},
        row("big", prompt="x" * 30_000),
    ]
    batch = ended(client, begin(client, *rows).id)
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    found = {(error.line, error.code) for error in batch.errors.data or ()}
    assert found == {
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "mismatched_endpoint"),
        (6, "invalid_method"),
        (7, "missing_required_parameter"),
        (8, "invalid_custom_id"),
        (9, "invalid_json_line"),
        (10, "invalid_custom_id"),
        (11, "unsupported_parameter"),
        (12, "line_too_long"),
    }
    assert service.worker.seen == []
    empty = ended(client, begin(client, b"").id)
    assert [error.code for error in (empty.errors and empty.errors.data) or ()] == ["empty_file"]


def test_an_input_that_was_damaged_on_the_disk_runs_no_row(
    client: OpenAI, service: RunningService
) -> None:
    file_id = upload(client, lines_of(row("a"), row("b")))
    blob = Path(f"{service.settings.files_dir}/{service.settings.namespace}.files/{file_id}")
    blob.write_bytes(blob.read_bytes().replace(b"row a", b"row x"))
    batch = client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )
    batch = ended(client, batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == ["input_file_damaged"]
    assert service.worker.seen == []


def test_files_are_listed_read_and_deleted(client: OpenAI) -> None:
    made = client.files.create(
        file=("näme 1.jsonl", b"{}\n"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (made.bytes, made.filename, made.purpose) == (3, "näme 1.jsonl", "batch")
    assert made.expires_at == made.created_at + 7200
    assert client.files.retrieve(made.id).id == made.id
    assert client.files.content(made.id).read() == b"{}\n"
    other = upload(client, b"")
    listed = [file.id for file in client.files.list(limit=1, purpose="batch")]
    assert {made.id, other} <= set(listed)
    assert len(set(listed)) == len(listed)
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "file_not_found"
    assert client.files.content(other).read() == b""


def test_what_cannot_be_a_file_is_refused_by_name(client: OpenAI, service: RunningService) -> None:
    def create(**members: Any) -> None:
        client.files.create(**({"file": ("x", b"{}"), "purpose": "batch"} | members))

    with pytest.raises(openai.BadRequestError) as caught:
        create(purpose="fine-tune")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as caught:
        create(expires_after={"anchor": "created_at", "seconds": 5})
    assert caught.value.param == "expires_after.seconds"
    with pytest.raises(openai.APIStatusError) as too_large:
        create(file=("x", b"x" * (MAX_FILE_BYTES + 1)))
    assert (too_large.value.status_code, too_large.value.code) == (413, "file_too_large")
    create(file=("x", b"x" * MAX_FILE_BYTES))
    url = f"{service.base_url}/v1/files"
    form = {"content-type": "multipart/form-data; boundary=xyz"}
    for headers, body in (
        ({"content-type": "application/json"}, b"{}"),
        ({"content-type": "multipart/form-data"}, b""),
        (form, b"--xyz\r\nnonsense"),
        (form, b""),
        (form, b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'),
        (form, b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz--'),
        (form, b"--xyz\r\nContent-Disposition: form-data\r\n\r\nbatch\r\n--xyz--"),
    ):
        answer = httpx.post(url, headers=headers, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    huge = httpx.post(url, headers=form, content=b"x" * (2 * MAX_FILE_BYTES))
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "request_too_large")
    other_route = httpx.post(
        f"{service.base_url}/v1/completions",
        content=b"x" * 20_001,
        headers={"content-type": "application/json"},
        timeout=LIMIT_S,
    )
    assert other_route.status_code == 413


def test_what_cannot_be_a_batch_is_refused_by_name(client: OpenAI) -> None:
    def create(**members: Any) -> None:
        begin(client, row("a"), **members)

    for members, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "never"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {f"k{index}": "" for index in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**members)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as absent:
        client.batches.create(
            input_file_id="file-x", endpoint="/v1/completions", completion_window="24h"
        )
    assert absent.value.code == "file_not_found"
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as unknown:
            call("batch_x")
        assert unknown.value.code == "batch_not_found"


def test_batches_are_listed_page_by_page(client: OpenAI) -> None:
    made = [begin(client, row("a")).id for _ in range(5)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:5] == made[::-1]
    assert len(set(listed)) == len(listed)
    for batch_id in made:
        ended(client, batch_id)


def test_outputs_are_files_of_their_own_life(client: OpenAI) -> None:
    after = {"anchor": "created_at", "seconds": 3600}
    batch = ended(client, begin(client, row("a"), output_expires_after=after).id)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.expires_at == output.created_at + 3600
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(
            input_file_id=output.id, endpoint="/v1/completions", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"
    client.files.delete(output.id)
    client.files.delete(batch.input_file_id)


def test_the_input_of_a_running_batch_cannot_be_deleted(
    client: OpenAI, service: RunningService
) -> None:
    service.script.starts = False
    batch = begin(client, row("a"))
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    service.script.starts = True
    ended(client, batch.id)
    client.files.delete(batch.input_file_id)


@pytest.mark.promise("Batches: cancel keeps finished rows, also after its frontend died")
def test_cancel_keeps_what_is_done(client: OpenAI, service: RunningService) -> None:
    service.script.stop_after = 3  # a row of more tokens hangs there
    rows = [row(f"r{index}", max_tokens=2 if index < 10 else 8) for index in range(40)]
    batch = begin(client, *rows)

    def counts() -> dict[str, Any]:
        counted = client.batches.retrieve(batch.id).request_counts
        assert counted is not None
        return counted.to_dict()

    wait_until(lambda: counts()["completed"] == 10, "the rows that end", LIMIT_S)
    wait_until(lambda: len(service.worker.jobs) == 8, "a window of rows that hang", LIMIT_S)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert counts() == {"total": 40, "completed": 10, "failed": 0}
    assert set(content(client, batch.output_file_id)) == {f"r{index}" for index in range(10)}
    assert batch.error_file_id is None
    assert client.batches.cancel(batch.id).status == "cancelled"
    wait_until(lambda: not service.worker.jobs, "the worker to drop them", LIMIT_S)
    assert len(service.worker.seen) == 18


def test_a_cancel_after_the_end_is_a_conflict(client: OpenAI) -> None:
    batch = ended(client, begin(client, row("a")).id)
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.code == "batch_has_ended"


@pytest.mark.promise(
    "Batches: after the completion window each row without a response has an error"
)
def test_a_batch_out_of_time_has_an_error_for_each_row_without_a_response(
    client: OpenAI, service: RunningService
) -> None:
    service.script.starts = False
    rows = [row(f"r{index}") for index in range(30)]
    for window in ("3s", "10s", "30s"):
        batch = ended(client, begin(client, *rows, completion_window=window).id)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert batch.request_counts is not None
        if batch.request_counts.total:  # else its time was over before it was validated
            break
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 0, "failed": 30}
    errors = content(client, batch.error_file_id)
    assert set(errors) == {f"r{index}" for index in range(30)}
    assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}
    assert {line["response"] for line in errors.values()} == {None}


@pytest.mark.promise(
    "Batches: interactive requests have priority over batches, which fill at most half of the "
    "queue (among queued jobs; a running row is not interrupted)"
)
def test_interactive_requests_run_before_a_batch(client: OpenAI, service: RunningService) -> None:
    service.park()
    batch = begin(client, *(row(f"r{index}") for index in range(8)))
    base = service.base_url

    def waiting() -> int:
        return int(httpx.get(f"{base}/health").json()["waiting"])

    wait_until(lambda: waiting() == 8, "the batch's rows to wait", LIMIT_S)
    with ExitStack() as stack:
        for _ in range(4):
            params = {"prompt": "me first", "max_tokens": 4}
            stack.enter_context(
                httpx.stream("POST", f"{base}/generate", json=params, timeout=LIMIT_S)
            )
        wait_until(lambda: waiting() == 12, "the requests to wait", LIMIT_S)
        service.script.pulls = True
        ended(client, batch.id)
    kinds = [delivery.job.kind for delivery in service.worker.seen]
    assert sorted(kinds) == ["completion"] * 8 + ["generate"] * 4
    # One of eight is the oldest of all, so that a batch goes on whatever else there is to do.
    assert kinds[:5].count("generate") == 4
    lanes = {delivery.job.kind: delivery.job.lane for delivery in service.worker.seen}
    assert lanes == {"completion": 7, "generate": 0}
