"""An upload, cut and split at every byte; and what a refused record leaves on the disk."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from api.errors import ApiError
from api.files.service import FilePolicy, FileService
from api.files.storage import FileStorage
from api.files.upload import Upload, UploadLimits, receive_upload
from api.http.open_requests import OpenRequests
from shared.messages import InvalidParameter
from shared.transport.ports.admission import QueueFull
from shared.transport.ports.files import FileLimits, FilesFull, FileUsage, NewFile
from shared.transport.ports.jobs import TransportError

CONTENT = b'{"a": 1}\r\n--xy\r\n--xyzz\r\n\r\n--xy'  # has beginnings of the boundary
FORM = (
    b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--xyz\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"Content-Type: application/jsonl\r\n\r\n" + CONTENT + b"\r\n--xyz--\r\n"
)
LIMITS = UploadLimits(max_bytes=1000, silence_s=10.0)


def request_of(chunks: Sequence[bytes], *, leaves: bool = False) -> Request:
    """A request with these chunks of a body; a client that `leaves` sends no end."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages.append(
        {"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b""}
    )

    async def receive() -> Any:
        return messages.pop(0)

    headers = [(b"content-type", b"multipart/form-data; boundary=xyz")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def received(request: Request) -> tuple[Upload, bytes]:
    written = bytearray()

    async def append(pieces: Sequence[bytes]) -> None:
        written.extend(b"".join(pieces))

    writer: Any = SimpleNamespace(append=append)
    upload = await receive_upload(request, writer, LIMITS, lambda: False)
    return upload, bytes(written)


async def test_a_form_is_the_same_wherever_it_is_split() -> None:
    whole = (Upload("a.jsonl", {"purpose": "batch"}), CONTENT)
    assert await received(request_of([FORM])) == whole
    assert await received(request_of([bytes([byte]) for byte in FORM])) == whole
    for cut in range(len(FORM)):
        assert await received(request_of([FORM[:cut], FORM[cut:]])) == whole


async def test_a_form_that_ends_early_is_refused_wherever_it_ends() -> None:
    for cut in range(len(FORM) - 2):  # its last line end may be missing
        with pytest.raises((ApiError, InvalidParameter)):
            await received(request_of([FORM[:cut]]))
        with pytest.raises(ClientDisconnect):
            await received(request_of([FORM[:cut]], leaves=True))


FOREIGN = b"""--xyz\r\nContent-Disposition: form-data; name="custom_llm_provider"\r\n\r\n""" + (
    b"a" * 3000 + b"\r\n"
)


async def test_fields_of_other_programs_are_left_out_and_named() -> None:
    request = request_of([FOREIGN, FORM])
    assert await received(request) == (Upload("a.jsonl", {"purpose": "batch"}), CONTENT)
    assert request.scope["state"]["response_headers"] == {
        "x-penstock-ignored": "custom_llm_provider"
    }
    strict = replace(LIMITS, refuse_unused=True)
    with pytest.raises(InvalidParameter, match="custom_llm_provider"):
        await receive_upload(request_of([FOREIGN, FORM]), None, strict, lambda: False)  # type: ignore[arg-type]


class Index:
    """Stands for the index: `put` raises `errors`, one a call; `known` are the ids of its files."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.known: set[str] = set()

    async def usage(self, tenant: str) -> FileUsage:
        return FileUsage(0, 0, 0, 0)

    async def put(self, file: NewFile, limits: FileLimits) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return file

    async def get(self, file_id: str, tenant: str) -> Any:
        return file_id if file_id in self.known else None

    async def sweep(self, removed: Sequence[str], count: int) -> Sequence[str]:
        return ()


@pytest.fixture
def index() -> Index:
    return Index()


@pytest.fixture
async def files(index: Index, tmp_path: Path) -> AsyncIterator[FileService]:
    policy = FilePolicy(FileLimits(9, 9999, 9, 9999), LIMITS, 86_400)
    storage = FileStorage(str(tmp_path), "ns")
    made = FileService(index, storage, policy, OpenRequests(9))  # type: ignore[arg-type]
    await made.start()
    yield made
    made.close()


@pytest.mark.parametrize("error", [FilesFull("files"), QueueFull("memory", 5.0)])
async def test_a_file_that_the_store_refuses_leaves_nothing_on_the_disk(
    files: FileService, index: Index, tmp_path: Path, error: Exception
) -> None:
    index.errors = [error, error]
    with pytest.raises((ApiError, QueueFull)):
        await files.receive(request_of([FORM]), "default")
    assert os.listdir(tmp_path / "ns.files") == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_file_of_an_outage_stays_on_the_disk_if_the_store_has_it(
    files: FileService, index: Index, tmp_path: Path, is_known: bool
) -> None:
    index.errors = [TransportError("away"), TransportError("away")]
    with pytest.raises(TransportError):
        await files.receive(request_of([FORM]), "default")
    (name,) = os.listdir(tmp_path / "ns.files")
    index.known = {name} if is_known else set()
    await files.sweep()
    assert os.listdir(tmp_path / "ns.files") == ([name] if is_known else [])
