"""docker-compose.yml: its form, what it keeps safe, and the settings that reach its services."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from api.settings import ApiSettings
from shared.environment import variable_of
from shared.settings import SharedSettings
from tests.support.compose_file import ComposeFile, interpolate
from worker.engine_settings import OF_ENGINES
from worker.settings import WorkerSettings

REPOSITORY = Path(__file__).resolve().parents[2]
SERVICES = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
ENGINES = {
    "worker": "penstock",
    "worker-gpu": "penstock",
    "worker-vllm": "vllm",
    "worker-vllm-gpu": "vllm",
    "worker-http": "http",
}
WORKERS = tuple(ENGINES)
# Why a setting does not reach a service.
LEFT_OUT_OF_FRONTEND = {
    "PENSTOCK_HOST": "the image's: all addresses of the container",
    "PENSTOCK_PORT": "the image's: where compose runs it is the published one, of the gateway",
    "PENSTOCK_FILES_DIR": "the image's: the volume",
    "PENSTOCK_SHUTDOWN_TIMEOUT_S": "stop_grace_period would have to grow with it",
}
LEFT_OUT_OF_WORKERS = {
    "PENSTOCK_ENGINE": "the image's; of worker-http the service's",
    "PENSTOCK_ENGINE_PYTHON": "the image's",
    "PENSTOCK_DEVICE": "the service's: worker or worker-gpu",
    "PENSTOCK_KV_OFFLOADING_DIR": "needs a volume, which an override file mounts",
    "PENSTOCK_KV_OFFLOADING_DIR_GB": "as the directory",
    "PENSTOCK_DRAIN_TIMEOUT_S": "stop_grace_period would have to grow with it",
}
OF_THE_HUB = {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}  # read by its client
# Those that do not have the value of the variable of the same name.
VALUES = {
    "PENSTOCK_REDIS_URL": {"redis://:${REDIS_PASSWORD:-penstock}@redis:6379/0"},
    "PENSTOCK_API_KEYS_FILE": {"${PENSTOCK_API_KEYS_FILE:+/run/penstock/keys.txt}"},
    "PENSTOCK_LOG_FORMAT": {"${PENSTOCK_LOG_FORMAT:-json}"},
    "PENSTOCK_PUBLISHED_HOST": {"${BIND:-127.0.0.1}"},
    "PENSTOCK_ALLOWED_HOSTS": {
        "${PENSTOCK_ALLOWED_HOSTS:-${PENSTOCK_API_KEYS:+*,}${PENSTOCK_API_KEYS_FILE:+*,}"
        "frontend,gateway}"
    },
    "PENSTOCK_MODEL": {"${PENSTOCK_MODEL:-}", "${VLLM_MODEL:-${PENSTOCK_MODEL:-}}"},
    "PENSTOCK_SERVED_MODEL_NAME": {
        "${PENSTOCK_SERVED_MODEL_NAME:-}",
        "${VLLM_SERVED_MODEL_NAME:-}",
    },
    "PENSTOCK_DEVICE": {"cuda"},
    "PENSTOCK_ENGINE": {"http"},
    "PENSTOCK_UPSTREAM_KEY_FILE": {"${PENSTOCK_UPSTREAM_KEY_FILE:+/run/penstock/upstream-key.txt}"},
    "PENSTOCK_METRICS_HOST": {"${PENSTOCK_METRICS_HOST:-0.0.0.0}"},
    "PENSTOCK_METRICS_PORT": {"${PENSTOCK_METRICS_PORT:-9464}"},
}


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.vllm"])
def test_compiled_kernels_are_kept_in_a_volume(dockerfile: str) -> None:
    """The root is read-only, and what is in a container's own files ends with it."""
    text = (REPOSITORY / "worker" / dockerfile).read_text()
    (cache,) = re.findall(r"^ENV .*\bTRITON_CACHE_DIR=(\S+)", text, re.M)
    chart = (REPOSITORY / "deploy/helm/penstock/templates/workers.yaml").read_text()
    (mounted,) = re.findall(r"name: cache, mountPath: ([^,}]+)", chart)
    assert Path(cache).is_relative_to(mounted)
    for name in WORKERS:
        volumes = dict(entry.split(":")[:2] for entry in SERVICES[name]["volumes"])
        assert Path(cache).is_relative_to(volumes["worker-cache"]), name


def test_the_compose_file_follows_the_compose_specification() -> None:
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("check-jsonschema")),
            "--builtin-schema",
            "vendor.compose-spec",
            str(REPOSITORY / "docker-compose.yml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_compose_scrapes_the_services_and_ports_that_it_has() -> None:
    scraped = yaml.safe_load((REPOSITORY / "deploy/observability/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in scraped["scrape_configs"]}
    (frontends,) = jobs["penstock-frontends"]["dns_sd_configs"]
    (workers,) = jobs["penstock-workers"]["dns_sd_configs"]
    assert (frontends["names"], frontends["port"]) == (["frontend"], 8000)
    assert (tuple(workers["names"]), workers["port"]) == (WORKERS, 9464)
    (deployment,) = jobs["penstock-deployment"]["static_configs"]
    assert deployment["targets"] == ["frontend:8000"], "once, by the name that all share"
    for name in ("prometheus", "grafana"):
        assert SERVICES[name]["profiles"] == ["observability"]
        for volume in SERVICES[name]["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (REPOSITORY / source).exists(), source


@pytest.mark.promise("Streaming: one command serves on port 8000")
def test_compose_keeps_jobs_safe_by_its_settings() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert command[command.index("--stream-node-max-bytes") + 1] == "1024"
    assert "healthcheck" in SERVICES["redis"]
    assert command[command.index("--maxmemory") + 1].startswith("${REDIS_MAXMEMORY:-")
    for name in SERVICES:
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert SERVICES[name]["logging"]["options"]["max-size"], "logs fill no disk"
    for name in (*WORKERS, "frontend"):
        assert SERVICES[name]["depends_on"]["redis"]["condition"] == "service_healthy"
        assert (REPOSITORY / SERVICES[name]["build"]["dockerfile"]).exists()
    profiles = {name: SERVICES[name].get("profiles", []) for name in WORKERS}
    assert profiles == {
        "worker": ["cpu"],
        "worker-gpu": ["gpu"],
        "worker-vllm": ["vllm"],
        "worker-vllm-gpu": ["vllm-gpu"],
        "worker-http": ["http"],
    }


def test_compose_starts_a_worker_on_the_cpu_unless_another_profile_is_named() -> None:
    compose = ComposeFile(REPOSITORY / "docker-compose.yml", {})
    needed = ["redis", "frontend", "gateway"]
    assert list(compose.enabled()) == [*needed, "worker"]
    assert list(compose.enabled({"gpu"})) == [*needed, "worker-gpu"]
    assert list(compose.enabled({"vllm"})) == [*needed, "worker-vllm"]
    for profile in ("observability", "webui"):
        names = list(compose.enabled({"cpu", profile}))
        assert names[:4] == [*needed, "worker"]
        assert len(names) > 4


def test_our_containers_write_into_volumes_alone_and_cannot_become_root() -> None:
    for name in ("gateway", "frontend", *WORKERS):
        service = SERVICES[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert any(entry.startswith("/tmp:") for entry in service["tmpfs"])
    for name in ("frontend", *WORKERS):
        text = (REPOSITORY / SERVICES[name]["build"]["dockerfile"]).read_text()
        (user,) = re.findall(r"^USER (\d+):\d+$", text, re.M)
        assert f"useradd --uid {user} " in text
        assert "cap_add" not in SERVICES[name]


def test_a_worker_without_a_gpu_is_built_with_torch_for_the_cpu() -> None:
    """The image's own default is that build; what compose passes on may replace it."""
    for dockerfile in ("worker/Dockerfile", "worker/Dockerfile.vllm"):
        (default,) = re.findall(
            r'^ARG TORCH_PIP_ARGS="(.*)"', (REPOSITORY / dockerfile).read_text(), re.M
        )
        assert default.startswith("--extra-index-url "), "where it is away, another one serves"
        assert default.endswith("/cpu")
    assert SERVICES["worker"]["build"]["args"] == {"TORCH_PIP_ARGS": None}
    assert SERVICES["worker-gpu"]["build"]["args"] == {"TORCH_PIP_ARGS": "${CUDA_TORCH_PIP_ARGS:-}"}
    assert SERVICES["worker-gpu"]["image"] != SERVICES["worker"]["image"]


def test_compose_gives_vllm_a_model_and_an_image_of_its_own() -> None:
    images = [SERVICES[name]["image"] for name in ("worker", "worker-vllm", "worker-vllm-gpu")]
    assert len(set(images)) == 3
    for name in ("worker-vllm", "worker-vllm-gpu"):
        assert (
            SERVICES[name]["environment"]["PENSTOCK_MODEL"] == "${VLLM_MODEL:-${PENSTOCK_MODEL:-}}"
        )
        assert SERVICES[name]["build"]["dockerfile"] == "worker/Dockerfile.vllm"
    assert SERVICES["worker-vllm-gpu"]["build"]["args"]["VLLM_DEVICE"] == "cuda"
    assert "VLLM_DEVICE" not in SERVICES["worker-vllm"]["build"]["args"]
    assert SERVICES["worker-vllm-gpu"]["deploy"] == SERVICES["worker-gpu"]["deploy"]


def test_compose_publishes_one_address_on_loopback_by_default() -> None:
    (port,) = SERVICES["gateway"]["ports"]
    assert port == "${BIND:-127.0.0.1}:${PENSTOCK_PORT:-8000}:8080"
    gateway = (REPOSITORY / "deploy/compose/haproxy.cfg").read_text()
    assert "    bind :8080\n" in gateway
    assert " frontend:8000\n" in gateway
    frontend = SERVICES["frontend"]
    assert "ports" not in frontend, "any number of them, behind one address"
    # What it is published on decides whether it asks for keys.
    assert frontend["environment"]["PENSTOCK_PUBLISHED_HOST"] == "${BIND:-127.0.0.1}"
    assert (
        frontend["environment"]["PENSTOCK_ALLOW_WITHOUT_KEYS"] == "${PENSTOCK_ALLOW_WITHOUT_KEYS:-}"
    )


def test_bind_publishes_the_api_alone() -> None:
    compose = ComposeFile(REPOSITORY / "docker-compose.yml", {"BIND": "0.0.0.0"})
    services = compose.enabled({"cpu", "observability", "webui"})
    published = {
        name: port.rsplit(":", 2)[0]
        for name, service in services.items()
        for port in service.raw.get("ports", [])
    }
    assert published == {
        "gateway": "0.0.0.0",
        "prometheus": "127.0.0.1",
        "grafana": "127.0.0.1",
        "open-webui": "127.0.0.1",
    }
    assert services["grafana"].environment["GF_SECURITY_ADMIN_PASSWORD"] == "", "made at the start"
    webui = services["open-webui"]
    assert webui.environment["ENABLE_SIGNUP"] == "false"
    # Older ones do not read WEBUI_ADMIN_EMAIL: nobody could make the first account.
    release = webui.raw["image"].rpartition(":v")[2]
    assert tuple(map(int, release.split("."))) >= (0, 7, 0)
    assert {"WEBUI_ADMIN_EMAIL", "WEBUI_ADMIN_PASSWORD"} <= webui.environment.keys()


def test_redis_has_a_network_of_its_own_and_a_password() -> None:
    of_all = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert of_all["networks"]["store"] == {"internal": True}
    inside = {name for name, service in SERVICES.items() if "store" in service.get("networks", ())}
    assert inside == {"redis", "frontend", *WORKERS}
    assert SERVICES["redis"]["networks"] == ["store"]
    for given, password in (("", "penstock"), ("s3", "s3")):
        compose = ComposeFile(REPOSITORY / "docker-compose.yml", {"REDIS_PASSWORD": given})
        services = compose.enabled({"cpu"})
        command = services["redis"].raw["command"]
        assert command[command.index("--requirepass") + 1] == password
        assert services["redis"].environment["REDISCLI_AUTH"] == password
        for name in ("frontend", "worker"):
            url = services[name].environment["PENSTOCK_REDIS_URL"]
            assert url == f"redis://:{password}@redis:6379/0"


@pytest.mark.parametrize("path", ["", "./keys.txt"])
@pytest.mark.parametrize(
    ("name", "variable", "mounted"),
    [
        ("frontend", "PENSTOCK_API_KEYS_FILE", "/run/penstock/keys.txt"),
        ("worker-http", "PENSTOCK_UPSTREAM_KEY_FILE", "/run/penstock/upstream-key.txt"),
    ],
)
def test_a_file_of_keys_reaches_its_service(
    name: str, variable: str, mounted: str, path: str
) -> None:
    services = ComposeFile(REPOSITORY / "docker-compose.yml", {variable: path}).enabled({"http"})
    assert services[name].environment[variable] == (mounted if path else "")
    assert f"{path or '/dev/null'}:{mounted}:ro" in services[name].raw["volumes"]


def test_compose_answers_for_the_names_that_other_containers_use() -> None:
    names = SERVICES["frontend"]["environment"]["PENSTOCK_ALLOWED_HOSTS"]
    # Without keys these two; with keys also any other name, as without the variable.
    assert {names} == VALUES["PENSTOCK_ALLOWED_HOSTS"]
    webui = SERVICES["open-webui"]["environment"]["OPENAI_API_BASE_URL"]
    assert webui == "http://gateway:8080/v1"


@pytest.mark.parametrize("service", ["frontend", *WORKERS])
def test_every_setting_reaches_its_service_or_is_left_out_for_a_reason(service: str) -> None:
    given = SERVICES[service]["environment"]
    given = {name: value for name, value in given.items() if not name.startswith("OTEL_")}
    if service == "frontend":
        settings, left_out = set(ApiSettings.model_fields), set(LEFT_OUT_OF_FRONTEND)
    else:
        settings, left_out = set(WorkerSettings.model_fields), set(LEFT_OUT_OF_WORKERS)
        for engines, names in OF_ENGINES.items():
            settings -= set(names) if ENGINES[service] not in engines else set()
        given = {name: value for name, value in given.items() if name not in OF_THE_HUB}
    known = {variable_of(name) for name in settings}
    assert known - left_out <= set(given), "pass it on, or say here why not"
    assert set(given) - known == set()
    others = {name: value for name, value in given.items() if value not in (None, f"${{{name}:-}}")}
    assert {
        name: value for name, value in others.items() if value not in VALUES.get(name, ())
    } == {}


def test_what_is_left_out_is_a_setting_that_no_service_has() -> None:
    frontend = set(SERVICES["frontend"]["environment"])
    assert frontend & set(LEFT_OUT_OF_FRONTEND) == set()
    assert set(map(variable_of, ApiSettings.model_fields)) >= set(LEFT_OUT_OF_FRONTEND)
    assert set(map(variable_of, WorkerSettings.model_fields)) >= set(LEFT_OUT_OF_WORKERS)
    for name in WORKERS:
        given = set(SERVICES[name]["environment"]) & set(LEFT_OUT_OF_WORKERS)
        own = {"PENSTOCK_ENGINE"} if name == "worker-http" else set()
        assert given == ({"PENSTOCK_DEVICE"} if name.endswith("gpu") else own)


def test_no_variable_of_an_image_is_taken_away() -> None:
    """Compose removes one that has no value here and is not set where compose runs."""
    for service in ("frontend", *WORKERS):
        dockerfile = (REPOSITORY / SERVICES[service]["build"]["dockerfile"]).read_text()
        of_image = set(re.findall(r"(\w+)=", "".join(re.findall(r"^ENV (.*)", dockerfile, re.M))))
        assert "PENSTOCK_LOG_FORMAT" in of_image
        given = SERVICES[service]["environment"]
        assert {name for name in of_image & set(given) if given[name] is None} == set()


def test_what_all_services_share_is_the_same_for_all() -> None:
    for name in map(variable_of, SharedSettings.model_fields):
        assert len({SERVICES[each]["environment"][name] for each in ("frontend", *WORKERS)}) == 1


def test_the_example_of_a_further_model_extends_a_service_by_its_settings() -> None:
    (example,) = re.findall(
        r"```yaml\n(.*?)```", (REPOSITORY / "docs/EXTENDING.md").read_text(), re.S
    )
    for service in yaml.safe_load(example)["services"].values():
        assert service["extends"]["file"] == "docker-compose.yml"
        given = SERVICES[service["extends"]["service"]]["environment"]
        assert set(service["environment"]) <= set(given)
        assert service["environment"]["PENSTOCK_MODEL"].startswith("/models/")


def test_variables_are_read_as_compose_reads_them() -> None:
    env = {"A": "1", "EMPTY": ""}
    for text, value in {
        "${A} ${EMPTY:-2} ${NONE:-3}": "1 2 3",
        "${A:+x}${EMPTY:+x}": "x",
        "${NONE:-${A:+*,}frontend}": "*,frontend",
        "${NONE:-${EMPTY:+*,}frontend} $$A": "frontend $A",
    }.items():
        assert interpolate(text, env) == value
    for text in ("${A-1}", "$A", "${A"):
        with pytest.raises(ValueError, match=r"closing|form"):
            interpolate(text, env)
