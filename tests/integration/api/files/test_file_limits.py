"""Files are bounded in number, size and life, and what goes leaves nothing on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.support.keys import Keys
from tests.support.redis_server import new_namespace
from tests.support.running_service import RunningService, running_frontend, wait_until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def service(redis_url: str, files_dir: Path) -> Iterator[RunningService]:
    """A frontend alone."""
    with running_frontend(
        redis_url,
        new_namespace(),
        files_dir=str(files_dir),
        max_file_bytes=4096,
        max_files_per_tenant=3,
        max_files_bytes_per_tenant=8192,
        max_open_batches_per_tenant=2,
        batches_at_once=0,
    ) as made:
        yield made


@pytest.fixture
def client(openai_client: OpenAI) -> Iterator[OpenAI]:
    yield openai_client
    for batch in openai_client.batches.list():
        if batch.status == "validating":
            openai_client.batches.cancel(batch.id)
    for file in openai_client.files.list():
        openai_client.files.delete(file.id)


def upload(client: OpenAI, size: int = 10) -> str:
    return client.files.create(file=("x.jsonl", b"x" * size), purpose="batch").id


def on_disk(service: RunningService) -> set[str]:
    return set(os.listdir(f"{service.settings.files_dir}/{service.settings.namespace}.files"))


def sweep(service: RunningService) -> None:
    service.call(service.app.state.services.files.sweep())


@pytest.mark.promise(
    "Batches: files are limited in number, bytes and lifetime, and leave nothing on the disk"
)
def test_a_tenant_has_its_share_of_files_and_bytes(client: OpenAI, service: RunningService) -> None:
    sweep(service)
    first = upload(client, 4096)
    upload(client, 4000)
    with pytest.raises(openai.PermissionDeniedError) as bytes_gone:
        upload(client, 4096)
    upload(client, 96)
    with pytest.raises(openai.PermissionDeniedError) as files_gone:
        upload(client, 0)
    assert bytes_gone.value.code == files_gone.value.code == "file_quota_exceeded"
    assert len(on_disk(service)) == 3
    client.files.delete(first)
    upload(client, 0)


def test_what_was_deleted_leaves_the_disk(client: OpenAI, service: RunningService) -> None:
    kept, gone = upload(client), upload(client)
    client.files.delete(gone)
    sweep(service)
    assert kept in on_disk(service)
    assert gone not in on_disk(service)


def test_open_batches_are_bounded(client: OpenAI) -> None:
    file_id = upload(client)

    def create() -> str:
        return client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        ).id

    first = create()
    create()
    with pytest.raises(openai.RateLimitError) as caught:
        create()
    assert caught.value.code == "too_many_batches"
    assert caught.value.response.headers["retry-after"]
    client.batches.cancel(first)
    create()


def test_a_client_that_leaves_in_the_middle_leaves_nothing(
    client: OpenAI, service: RunningService
) -> None:
    sweep(service)
    before = on_disk(service)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n"
        "content-type: multipart/form-data; boundary=xyz\r\n\r\n"
        '--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    with service.connect() as connection:
        connection.sendall(head.encode() + b"x" * 1000)
        wait_until(lambda: len(on_disk(service)) == len(before) + 1, "the upload's begin", LIMIT_S)
    wait_until(lambda: on_disk(service) == before, "the upload's end", LIMIT_S)
    assert not list(client.files.list())


def test_tenants_do_not_see_the_files_and_batches_of_others(
    redis_url: str,
    tmp_path: Path,
) -> None:
    keys = Keys(a="", b="")
    with running_frontend(
        redis_url,
        new_namespace(),
        files_dir=str(tmp_path),
        api_keys=keys.lines,
        batches_at_once=0,
    ) as keyed:
        url = f"{keyed.base_url}/v1"
        mine, other = (OpenAI(base_url=url, api_key=key, max_retries=0) for key in keys.values())
        with mine, other:
            file_id = upload(mine)
            batch_id = mine.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            ).id
            assert list(other.files.list()) == []
            assert list(other.batches.list()) == []
            for call, name in (
                (other.files.retrieve, file_id),
                (other.files.content, file_id),
                (other.files.delete, file_id),
                (other.batches.retrieve, batch_id),
                (other.batches.cancel, batch_id),
            ):
                with pytest.raises(openai.NotFoundError):
                    call(name)
            with pytest.raises(openai.NotFoundError):
                other.batches.create(
                    input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
                )
            assert [batch.id for batch in mine.batches.list()] == [batch_id]


def test_damage_is_never_taken_for_content(client: OpenAI, service: RunningService) -> None:
    file_id = upload(client, 4096)
    blob = Path(f"{service.settings.files_dir}/{service.settings.namespace}.files/{file_id}")
    blob.write_bytes(b"x" * 4095 + b"y")
    with pytest.raises(openai.APIConnectionError):
        client.files.content(file_id)
    blob.write_bytes(b"x" * 4095)
    with pytest.raises(openai.InternalServerError) as caught:
        client.files.content(file_id)
    assert caught.value.code == "file_content_lost"


def test_a_frontend_without_a_directory_refuses_files(
    redis_url: str,
) -> None:
    with (
        running_frontend(redis_url, new_namespace()) as bare,
        OpenAI(base_url=f"{bare.base_url}/v1", api_key="none") as client,
    ):
        with pytest.raises(
            openai.InternalServerError, match="PENSTOCK_FILES_DIR is not set"
        ) as caught:
            upload(client)
        assert (caught.value.status_code, caught.value.code) == (503, "files_unavailable")
        with pytest.raises(openai.InternalServerError) as no_batches:
            client.batches.create(
                input_file_id="file-0-x", endpoint="/v1/completions", completion_window="24h"
            )
        assert no_batches.value.code == "files_unavailable"
        assert list(client.files.list()) == []
        assert list(client.batches.list()) == []
