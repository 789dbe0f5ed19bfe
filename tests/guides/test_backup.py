"""The guide's backups, made of a running service, and restored by other servers."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
import redis

from penstock.client import Client
from penstock.launcher.redis_server import PrivateServer
from tests.support.redis_server import new_namespace
from tests.support.running_service import (
    MODEL,
    make_tiny_checkpoint,
    running_service,
    wait_until,
)

FILE = b'{"custom_id": "a"}\n'


class Deployment:
    """What there was when the backup was made."""

    def __init__(self, root: Path) -> None:
        self.namespace = new_namespace()
        self.checkpoint = make_tiny_checkpoint(root)
        self.backup = root / "backup"  # of the server's directory
        self.files = root / "files-of-backup"
        self.response_id = self.text = self.file_id = ""

    def use(self, url: str, files: Path) -> None:
        """Leaves a stored response and a file."""
        with (
            running_service(url, self.namespace, self.checkpoint, files_dir=str(files)) as service,
            Client(service.base_url) as client,
        ):
            self.response_id = client.submit("a gate", model=MODEL, max_output_tokens=8)
            self.text = client.follow(self.response_id).result().text
            answer = httpx.post(
                f"{service.base_url}/v1/files",
                files={"file": ("rows.jsonl", FILE)},
                data={"purpose": "batch"},
            )
            self.file_id = answer.json()["id"]

    def expect_all_of_it(self, url: str) -> None:
        """The response and the file are there, for another service over the restored copy."""
        with (
            running_service(
                url, self.namespace, self.checkpoint, files_dir=str(self.files)
            ) as service,
            Client(service.base_url) as client,
        ):
            stored = client.call("GET", f"/v1/responses/{self.response_id}")
            assert stored["output"][0]["content"][0]["text"] == self.text
            content = httpx.get(f"{service.base_url}/v1/files/{self.file_id}/content")
            assert content.content == FILE
            assert client.submit("again", model=MODEL), "and it serves"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    root = tmp_path_factory.mktemp("backup")
    made = Deployment(root)
    files = root / "files"
    files.mkdir()
    with PrivateServer(root / "server") as server:
        made.use(server.url, files)
        with redis.Redis.from_url(server.url) as admin:
            admin.bgsave()
            wait_until(lambda: not admin.info("persistence")["rdb_bgsave_in_progress"], "BGSAVE")
        shutil.copytree(server.data_dir, made.backup, ignore=shutil.ignore_patterns("*.sock"))
        shutil.copytree(files, made.files)
    return made


def test_a_copy_of_the_append_only_file_is_the_deployment(
    deployment: Deployment, tmp_path: Path
) -> None:
    shutil.copytree(deployment.backup / "appendonlydir", tmp_path / "appendonlydir")
    with PrivateServer(tmp_path) as server:
        deployment.expect_all_of_it(server.url)


class WithoutFile(PrivateServer):
    """A server that starts with what a snapshot has."""

    def _command_of(self, path: str) -> list[str]:
        words = super()._command_of(path)
        words[words.index("--appendonly") + 1] = "no"
        return words


def test_a_snapshot_is_read_by_a_server_without_an_append_only_file_alone(
    deployment: Deployment, tmp_path: Path
) -> None:
    """One that is started with `appendonly yes` begins empty, and says nothing."""
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        shutil.copy(deployment.backup / "dump.rdb", tmp_path / name / "dump.rdb")
    with (
        PrivateServer(tmp_path / "with") as server,
        redis.Redis.from_url(server.url) as admin,
    ):
        assert admin.dbsize() == 0
    with (
        WithoutFile(tmp_path / "without") as server,
        redis.Redis.from_url(server.url) as admin,
    ):
        admin.config_set("appendonly", "yes")
        deployment.expect_all_of_it(server.url)
