"""Query strings of lists: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_type_hints

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from api.batches.routes import BatchService
from api.files.protocol import FileList, FileObject
from api.files.service import FileService
from api.http.open_requests import OpenRequests
from api.http.pagination import ListQuery
from api.http.sse import json_pieces
from api.http.time_slices import TimeSlices
from api.main import create_app
from api.settings import ApiSettings
from shared.messages import Usage
from shared.transport.ports.batches import BatchError, BatchProgress, BatchRecord, BatchStatus
from shared.transport.ports.files import FilePart, FileRecord

FILE = FileRecord("file-0-x", "default", "batch", "näme", 5, (FilePart("a", 5, "00"),), 1999, 5001)
BATCH = BatchRecord(
    batch_id="batch_0-2",
    tenant="default",
    endpoint="/v1/completions",
    input_file_id="file-0-x",
    window="24h",
    metadata={"a": "b"},
    created_ms=1001,
    expires_ms=90001,
    status=BatchStatus.CANCELLED,
    times_ms={BatchStatus.IN_PROGRESS: 2000, BatchStatus.CANCELLED: 4000},
    progress=BatchProgress(total=5, completed=2, failed=1, model="m", usage=Usage(7, 8, 3)),
    output_file_id="o",
    errors=(BatchError("c", "m"), BatchError("c", "m", "p", 3)),
)


class Lists:
    """Stands for the files and the batches: one object follows another for ever."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.file, self.batch = FILE, BATCH

    async def list(self, *args: Any, **options: Any) -> Sequence[Any]:
        self.calls.append((*args, *options.values()))
        return [self.batch if not options else self.file] * args[2]

    async def get(self, *args: Any) -> Any:
        return self.file

    async def find(self, *args: Any) -> Any:
        return self.batch


@pytest.fixture
def lists() -> Lists:
    return Lists()


@pytest.fixture
async def client(lists: Lists) -> Any:
    app: FastAPI = create_app(ApiSettings(redis_url="redis://127.0.0.1:1"))
    app.state.parts = {
        FileService: SimpleNamespace(index=lists, get=lists.get),
        BatchService: lists,
        TimeSlices: TimeSlices(),
        OpenRequests: app.state.open_requests,
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/v1/files", ("default", None, 10_001, False, None)),
        ("/v1/files?limit=2&after=x&order=asc&purpose=batch", ("default", "x", 3, True, "batch")),
        ("/v1/files?purpose=", ("default", None, 10_001, False, "")),
        ("/v1/files?purpose=assistants", ("default", None, 10_001, False, "assistants")),
        ("/v1/files?limit=1&limit=2", ("default", None, 3, False, None)),
        ("/v1/batches", ("default", None, 21)),
        ("/v1/batches?limit=100&after=x%20y", ("default", "x y", 101)),
    ],
)
async def test_a_query_is_read(
    client: httpx.AsyncClient, lists: Lists, path: str, call: tuple[Any, ...]
) -> None:
    assert (await client.get(path)).status_code == 200
    assert lists.calls == [call]


@pytest.mark.parametrize(
    ("path", "code", "param"),
    [
        *(
            (f"/v1/{name}?limit={limit}", None, "limit")
            for name in ("files", "batches")
            for limit in (
                "",
                "0",
                "x",
                "-1",
                "%2B5",
                "5.0",
                "%205",
                "1_0",
                "10001",
                "0000001",
                "9" * 5000,
                "²",
            )
        ),
        ("/v1/files?after=", None, "after"),
        ("/v1/batches?after=" + "x" * 201, None, "after"),
        ("/v1/files?order=up", None, "order"),
        ("/v1/batches?order=asc", "unsupported_parameter", "order"),
        ("/v1/files?nonsense=1&limit=0", "unsupported_parameter", "nonsense"),
        ("/v1/files/file-0-x?nonsense", "unsupported_parameter", "nonsense"),
        ("/v1/files/file-0-x/content?limit=1", "unsupported_parameter", "limit"),
        ("/v1/batches/batch_0-2?a=1&b=2", "unsupported_parameter", "a"),
        ("/v1/batches?" + "x" * 300, "unsupported_parameter", "x" * 200),
    ],
)
async def test_what_a_query_cannot_have_is_refused_by_name(
    client: httpx.AsyncClient, lists: Lists, path: str, code: str | None, param: str
) -> None:
    response = await client.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert param in error["message"]
    assert not lists.calls


def test_of_many_unknown_parameters_one_is_an_error() -> None:
    with pytest.raises(ValidationError) as caught:
        ListQuery.model_validate({f"x{number}": "" for number in range(20_000)} | {"limit": "1"})
    assert [error["loc"] for error in caught.value.errors()] == [("x0",)]


async def test_objects_and_pages_have_their_fields_in_openais_order(
    client: httpx.AsyncClient,
) -> None:
    file = (
        '{"id":"file-0-x","object":"file","bytes":5,"created_at":1,"expires_at":5,'
        '"filename":"näme","purpose":"batch","status":"processed","status_details":null}'
    )
    batch = (
        '{"id":"batch_0-2","object":"batch","endpoint":"/v1/completions","model":"m",'
        '"errors":{"object":"list","data":[{"code":"c","message":"m","param":null,"line":null},'
        '{"code":"c","message":"m","param":"p","line":3}]},"input_file_id":"file-0-x",'
        '"completion_window":"24h","status":"cancelled","output_file_id":"o",'
        '"error_file_id":null,"created_at":1,"expires_at":90,"in_progress_at":2,'
        '"finalizing_at":null,"completed_at":null,"failed_at":null,"expired_at":null,'
        '"cancelling_at":null,"cancelled_at":4,'
        '"request_counts":{"total":5,"completed":2,"failed":1},'
        '"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},'
        '"output_tokens":8,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":15},'
        '"metadata":{"a":"b"}}'
    )
    for path, text in (("/v1/files", file), ("/v1/batches", batch)):
        name = {"/v1/files": "file-0-x", "/v1/batches": "batch_0-2"}[path]
        assert (await client.get(f"{path}/{name}")).text == text
        page = f'{{"object":"list","data":[{text}],"first_id":"{name}","last_id":"{name}",'
        assert (await client.get(f"{path}?limit=1")).text == page + '"has_more":true}'


async def test_no_client_finds_a_line_end_inside_an_object_or_a_list(
    client: httpx.AsyncClient, lists: Lists
) -> None:
    """Legal JSON, but clients that split with str.splitlines() would read half of it."""
    line_ends = "a\u0085b\u2028c\u2029d"
    lists.file = replace(FILE, name=line_ends)
    lists.batch = replace(BATCH, metadata={"a": line_ends})
    for path in ("/v1/files", "/v1/files/file-0-x", "/v1/batches", "/v1/batches/batch_0-2"):
        text = (await client.get(path)).text
        assert len(text.splitlines()) == 1
        assert line_ends in json.dumps(json.loads(text), ensure_ascii=False)


def test_a_long_list_is_sent_in_pieces() -> None:
    """A page of 10,000 files is encoded for tens of milliseconds: other streams are served
    meanwhile."""
    page = FileList.of([FILE] * 10_001, 10_000, FileObject.of)
    pieces = list(json_pieces(page))
    assert max(map(len, pieces)) < 32_768
    whole = json.loads(b"".join(pieces))
    assert len(whole["data"]) == 10_000
    assert whole["has_more"]


def test_no_route_leaves_its_model_to_the_framework() -> None:
    """FastAPI would validate it once more, encode it at once, and keep line ends as they are."""
    app = create_app(ApiSettings(redis_url="redis://127.0.0.1:1"))
    included = [getattr(route, "original_router", route) for route in app.routes]
    routes = [route for router in included for route in getattr(router, "routes", [router])]
    routes = [route for route in routes if isinstance(route, APIRoute)]
    assert len(routes) > 20
    for route in routes:
        returned = get_type_hints(route.endpoint)["return"]
        assert isinstance(returned, type), route.path
        assert issubclass(returned, Response), route.path
