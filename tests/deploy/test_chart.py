"""The Helm chart, by Helm itself: linted, installed into a stand-in for a cluster's API, and what
was sent there held against the schemas of the oldest and the newest Kubernetes.

Not shown: that a cluster runs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.routing import APIRoute

from api.metrics import DEPLOYMENT_METRICS
from api.settings import ApiSettings
from api.system import health
from shared.environment import variable_of
from tests.support.kubernetes_api import KubernetesApi
from tests.support.pinned_environment import pinned_environment
from worker.heartbeat import WorkerProbes
from worker.metrics import METRICS as WORKER_METRICS
from worker.settings import WorkerSettings

pytestmark = [pytest.mark.packages, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "deploy/helm/penstock"
KUBERNETES = ("1.27", "1.37")
# Those whose kinds Kubernetes itself has no schema of.
OF_OTHERS = {"ScaledObject", "PodMonitor", "PrometheusRule", "ScrapeConfig"}
OF_TRACING = {
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_TRACES_SAMPLER_ARG",
}
WORKS_ON_A_GPU = {"name": "big", "served": "Qwen3-8B", "gpus": 2, "engine": "vllm"}
RUNBOOKS = "https://git.example.org/penstock/"
EVERYTHING: dict[str, Any] = {
    "apiKeys": {"lines": ["sha256:00 tenant=a", "sha256:11 tenant=b"]},
    "image": {"repository": "registry.example.org/penstock/", "tag": "1.2.3"},
    "ingress": {"enabled": True, "tlsSecret": "tls"},
    "monitoring": {
        "enabled": True,
        "keySecret": "scrapes",
        "labels": {"release": "prometheus"},
        "runbooks": RUNBOOKS,
    },
    "tracing": {
        "endpoint": "http://collector.traces.svc:4318",
        "headersSecret": "collector",
        "settings": {"OTEL_TRACES_SAMPLER_ARG": 0.25},
    },
    "networkPolicy": {
        "frontendFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
        "collectorTo": [{"namespaceSelector": {"matchLabels": {"name": "traces"}}}],
    },
    "frontend": {
        "autoscaling": {"enabled": True},
        "files": {"existingClaim": "files"},
        "settings": {"PENSTOCK_MAX_QUEUED_JOBS": 200},
        "podAnnotations": {"example.org/team": "models"},
        "priorityClassName": "serving",
    },
    "workers": {
        "settings": {
            "PENSTOCK_NUM_KV_BLOCKS": 1_000_000,
            "PENSTOCK_MEMORY_SHARE": 0.5,
            "PENSTOCK_PREFIX_CACHING": False,
        },
        "models": {"existingClaim": "models"},
        "cache": {"existingClaim": "cache"},
        "hubTokenSecret": "hub",
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "runtimeClassName": "nvidia",
    },
    "models": [
        {"name": "demo", "served": "penstock-demo", "settings": {"PENSTOCK_NUM_THREADS": 2}},
        {
            **WORKS_ON_A_GPU,
            "autoscaling": {"enabled": True},
            "tolerations": [{"key": "gpu"}],
            "tag": "1.3",
        },
        {
            "name": "there",
            "served": "Qwen3-0.6B",
            "engine": "http",
            "settings": {
                "PENSTOCK_UPSTREAM_URLS": "http://a.models.svc:9000 weight=2, https://b.example"
            },
            "upstreamKeySecret": "upstream",
        },
        {
            "name": "turns",
            "served": "chat.v1",
            "settings": {"PENSTOCK_MODEL": "/models/chat", "PENSTOCK_MODEL_SWAP_WAIT_S": 10},
            "onDemand": [{"served": "code", "model": "org/code@main"}],
            "autoscaling": {"enabled": True},
        },
    ],
}


def call(*arguments: str, given: object = None) -> Any:
    python = pinned_environment(HERE / "helm.txt", "helm", for_any_python=True) / "bin/python"
    ended = subprocess.run(
        [str(python), str(HERE / "helm_calls.py"), *arguments],
        input=json.dumps(given),
        env={**os.environ, "HELM_DRIVER": "memory"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


class Installed:
    """What one `helm install --namespace prod rel` has sent."""

    def __init__(self, values: dict[str, Any], chart: Path = CHART) -> None:
        with KubernetesApi() as api:
            request = {"values": values, "kubeconfig": api.kubeconfig()}
            answer = call("install", str(chart), "rel", "prod", given=request)
        self.error: str = answer.get("error", "")
        self.objects = api.objects

    def one(self, kind: str, name: str) -> dict[str, Any]:
        return self.objects[kind, name]

    def pods(self) -> dict[str, dict[str, Any]]:
        """Returns the templates of pods, by the names of what has them."""
        return {
            name: made["spec"]["template"]
            for (kind, name), made in self.objects.items()
            if kind in ("Deployment", "StatefulSet")
        }

    def container(self, name: str) -> dict[str, Any]:
        (container,) = self.pods()[name]["spec"]["containers"]
        return container

    def env(self, name: str) -> dict[str, Any]:
        return {each["name"]: each.get("value") for each in self.container(name)["env"]}


@pytest.fixture(scope="module")
def everything() -> Installed:
    installed = Installed(EVERYTHING)
    assert installed.error == ""
    return installed


@pytest.fixture(scope="module")
def smallest() -> Installed:
    installed = Installed({"allowWithoutKeys": True})
    assert installed.error == ""
    return installed


def test_helm_has_no_complaint() -> None:
    linted = call("lint", str(CHART))
    # 1: a recommendation (an icon); 2: a warning; 3: an error.
    assert [message for message in linted["Messages"] if message["Severity"] > 1] == []


def test_helm_complains_of_what_is_wrong(tmp_path: Path) -> None:
    broken = tmp_path / "penstock"
    shutil.copytree(CHART, broken)
    (broken / "templates/extra.yaml").write_text("a: {{ .Values.image.repository | nosuch }}\n")
    linted = call("lint", str(broken))
    assert [message for message in linted["Messages"] if message["Severity"] == 3]


@pytest.mark.parametrize("version", KUBERNETES)
def test_what_is_sent_follows_the_schemas_of_kubernetes(
    everything: Installed, smallest: Installed, version: str
) -> None:
    objects = [
        made
        for installed in (everything, smallest)
        for (kind, _), made in installed.objects.items()
        if kind not in OF_OTHERS
    ]
    assert len(objects) > 20
    assert call("validate", version, given=objects) == []
    wrong = json.loads(json.dumps(everything.one("Deployment", "rel-penstock-demo")))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    (fault,) = call("validate", version, given=[wrong])
    assert "livenessprobe" in fault


def test_a_first_install_says_what_it_needs() -> None:
    refused = Installed({})
    assert "set apiKeys.lines or apiKeys.existingSecret" in refused.error
    assert refused.objects == {}
    refused = Installed({"allowWithoutKeys": True, "redis": {"bundled": False}})
    assert "redis.external.url" in refused.error
    refused = Installed({"apiKeys": {"lines": ["x"]}, "monitoring": {"enabled": True}})
    assert "monitoring.keySecret" in refused.error
    for values in (
        {"frontend": {"replicas": 0}},
        {"models": [{"name": "Upper", "served": "x"}]},
        {"models": [{"name": "x", "served": 'a"b'}]},
        {"unknown": 1},
        {"models": [{"name": "x", "served": "x", "gpu": 1}]},
        {"frontend": {"settings": {"PENSTOCK_MAX_QUEUED_JOB": 200}}},
        {"frontend": {"settings": {"PENSTOCK_MAX_NUM_SEQS": 200}}},
        {"workers": {"settings": {"PENSTOCK_LEASE_MS": "ten"}}},
        {"workers": {"settings": {"PENSTOCK_LEASE_MS": 1}}},
        {"models": [{"name": "x", "served": "x", "settings": {"PENSTOCK_DTYPE": "int4"}}]},
        {"frontend": {"settings": {"PENSTOCK_LOG_LEVEL": "loud"}}},
        {"frontend": {"settings": {"PENSTOCK_REFUSE_UNUSED_PARAMETERS": 2}}},
        {"redis": {"maxMemory": "2gb"}},
        {"workers": {"engine": "other"}},
        {"tracing": {"endpoint": "collector:4317"}},
        {"tracing": {"settings": {"PENSTOCK_PORT": 1}}},
        {"networkPolicy": {"prometheusFrom": []}},
    ):
        assert "schema" in Installed({"allowWithoutKeys": True, **values}).error, values
    for value in (True, "true", "TRUE", 1, "0"):
        settings = {"PENSTOCK_LOG_LEVEL": "info", "PENSTOCK_REFUSE_UNUSED_PARAMETERS": value}
        made = Installed({"allowWithoutKeys": True, "frontend": {"settings": settings}})
        assert made.error == "", value


def test_a_new_chart_alone_restarts_no_pod(everything: Installed) -> None:
    """What names the version is no part of a pod's template."""
    assert len(everything.pods()) > 2
    for pod in everything.pods().values():
        labels = pod["metadata"]["labels"]
        assert {"helm.sh/chart", "app.kubernetes.io/version"} & set(labels) == set()


def test_every_pod_has_no_rights_and_a_read_only_root(everything: Installed) -> None:
    pods = everything.pods()
    names = ("frontend", "demo", "big", "there", "turns", "redis")
    assert set(pods) == {f"rel-penstock-{name}" for name in names}
    for name, template in pods.items():
        spec, container = template["spec"], everything.container(name)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        # PENSTOCK_PORT=tcp://... of a Service would be read as a setting.
        assert spec["enableServiceLinks"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        assert container["resources"]["limits"]["memory"]


def test_a_pod_that_stops_has_longer_than_it_drains(everything: Installed) -> None:
    frontend, pod = everything.container("rel-penstock-frontend"), everything.pods()
    (_, pause) = frontend["lifecycle"]["preStop"]["exec"]["command"]
    env = everything.env("rel-penstock-frontend")
    needed = int(pause) + float(env["PENSTOCK_SHUTDOWN_TIMEOUT_S"])
    assert pod["rel-penstock-frontend"]["spec"]["terminationGracePeriodSeconds"] > needed
    for name in ("rel-penstock-demo", "rel-penstock-big"):
        drain = float(everything.env(name)["PENSTOCK_DRAIN_TIMEOUT_S"])
        assert pod[name]["spec"]["terminationGracePeriodSeconds"] >= drain + 20
        probe = everything.container(name)["startupProbe"]
        loading = float(everything.env(name)["PENSTOCK_LOAD_TIMEOUT_S"])
        assert probe["failureThreshold"] * probe["periodSeconds"] >= loading
    disruptions = {n for kind, n in everything.objects if kind == "PodDisruptionBudget"}
    assert disruptions == set(pod) - {"rel-penstock-redis"}


def test_probes_ask_what_the_processes_answer(everything: Installed) -> None:
    answered = {route.path for route in health.router.routes if isinstance(route, APIRoute)}
    for name in ("rel-penstock-frontend", "rel-penstock-demo", "rel-penstock-big"):
        container = everything.container(name)
        ports = {port["name"] for port in container["ports"]}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["port"] in ports
            if name == "rel-penstock-frontend":
                assert asked["path"] in answered
            else:
                with suppress(AttributeError):  # it looks at a worker, which is not there
                    assert WorkerProbes(None, None).by_path(asked["path"]) is not None  # type: ignore[arg-type]


def test_every_variable_is_a_setting_of_its_process(everything: Installed) -> None:
    beside = {"REDIS_PASSWORD", "HF_TOKEN", "HTTPS_PROXY", *OF_TRACING}
    known = set(map(variable_of, ApiSettings.model_fields))
    assert everything.env("rel-penstock-frontend").keys() - beside <= known
    known = set(map(variable_of, WorkerSettings.model_fields))
    for name in ("rel-penstock-demo", "rel-penstock-big"):
        assert everything.env(name).keys() - beside <= known
    env = everything.env("rel-penstock-demo")
    values = (
        env["PENSTOCK_NUM_KV_BLOCKS"],
        env["PENSTOCK_MEMORY_SHARE"],
        env["PENSTOCK_PREFIX_CACHING"],
        env["PENSTOCK_NUM_THREADS"],
    )
    assert values == ("1000000", "0.5", "false", "2")
    assert "PENSTOCK_NUM_THREADS" not in everything.env("rel-penstock-big")


def test_a_worker_with_models_on_demand_gets_their_list(everything: Installed) -> None:
    env = everything.env("rel-penstock-turns")
    assert env["PENSTOCK_MODELS"] == "chat.v1=/models/chat,code=org/code@main"
    assert {"PENSTOCK_MODEL", "PENSTOCK_SERVED_MODEL_NAME"} & env.keys() == set()
    settings = WorkerSettings(redis_url="redis://nowhere", models=env["PENSTOCK_MODELS"])
    assert settings.named_models == {"chat.v1": "/models/chat", "code": "org/code@main"}
    triggers = everything.one("ScaledObject", "rel-penstock-turns")["spec"]["triggers"]
    for trigger in triggers:
        assert r'model_name=~"chat\\.v1|code"' in trigger["metadata"]["query"]


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"onDemand": [{"served": "b", "model": "/b"}]}, "need settings.PENSTOCK_MODEL"),
        ({"settings": {"PENSTOCK_MODELS": "a=/a"}}, "give the list as onDemand"),
        ({"onDemand": [{"served": "b=c", "model": "/b"}]}, "schema"),
    ],
)
def test_a_list_of_models_that_no_worker_would_take_is_refused(
    model: dict[str, Any], sentence: str
) -> None:
    refused = Installed(
        {"allowWithoutKeys": True, "models": [{"name": "x", "served": "a", **model}]}
    )
    assert sentence in refused.error


def test_keys_are_a_file_that_changes_with_its_secret(everything: Installed) -> None:
    """A variable would need a restart; frontends look at the file every two seconds."""
    spec = everything.pods()["rel-penstock-frontend"]["spec"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "keys")
    secret = everything.one("Secret", volume["secret"]["secretName"])
    (item,) = volume["secret"]["items"]
    assert secret["stringData"][item["key"]].splitlines() == EVERYTHING["apiKeys"]["lines"]
    (mount,) = (
        each
        for each in everything.container("rel-penstock-frontend")["volumeMounts"]
        if each["name"] == "keys"
    )
    # A subPath would not follow the secret.
    assert mount == {"name": "keys", "mountPath": mount["mountPath"], "readOnly": True}
    env = everything.env("rel-penstock-frontend")
    assert env["PENSTOCK_API_KEYS_FILE"] == f"{mount['mountPath']}/{item['path']}"
    assert "PENSTOCK_API_KEYS" not in env


def test_pods_have_what_their_cluster_asks_for(everything: Installed) -> None:
    frontend, demo = (everything.pods()[f"rel-penstock-{name}"] for name in ("frontend", "demo"))
    assert frontend["metadata"]["annotations"] == {"example.org/team": "models"}
    assert frontend["spec"]["priorityClassName"] == "serving"
    assert demo["spec"]["runtimeClassName"] == "nvidia"
    assert everything.env("rel-penstock-demo")["HTTPS_PROXY"] == "http://proxy:3128"


def test_each_model_has_workers_of_its_kind(everything: Installed) -> None:
    prefix = "registry.example.org/penstock/"
    big, demo = everything.container("rel-penstock-big"), everything.container("rel-penstock-demo")
    assert big["image"] == f"{prefix}penstock-worker-vllm-cuda:1.3", "its own tag"
    assert big["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert demo["image"] == f"{prefix}penstock-worker:1.2.3"
    assert "nvidia.com/gpu" not in demo["resources"]["limits"]
    served = [
        everything.env(f"rel-penstock-{name}")["PENSTOCK_SERVED_MODEL_NAME"]
        for name in ("big", "demo")
    ]
    assert served == ["Qwen3-8B", "penstock-demo"]
    devices = [
        everything.env(f"rel-penstock-{name}")["PENSTOCK_DEVICE"] for name in ("big", "demo")
    ]
    assert devices == ["cuda", "cpu"]
    # A device that is in use is given up first.
    strategy = everything.one("Deployment", "rel-penstock-big")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_a_queue_for_a_server_that_runs_has_its_key_and_reaches_it(everything: Installed) -> None:
    there = everything.container("rel-penstock-there")
    assert there["image"] == "registry.example.org/penstock/penstock-worker:1.2.3"
    env = everything.env("rel-penstock-there")
    assert env["PENSTOCK_ENGINE"] == "http"
    assert env["PENSTOCK_UPSTREAM_KEY_FILE"] == "/run/penstock/upstream/key"
    (volume,) = (
        each
        for each in everything.pods()["rel-penstock-there"]["spec"]["volumes"]
        if each["name"] == "upstream-key"
    )
    assert volume["secret"] == {"secretName": "upstream", "items": [{"key": "key", "path": "key"}]}
    egress = everything.one("NetworkPolicy", "rel-penstock-worker")["spec"]["egress"]
    assert {"ports": [{"port": 9000}, {"port": 443}]} in egress


def test_workers_come_from_zero_by_how_long_jobs_wait(everything: Installed) -> None:
    scaled = {name for kind, name in everything.objects if kind == "ScaledObject"}
    assert scaled == {"rel-penstock-big", "rel-penstock-turns"}
    spec = everything.one("ScaledObject", "rel-penstock-big")["spec"]
    assert spec["scaleTargetRef"] == {"name": "rel-penstock-big"}
    assert "replicas" not in everything.one("Deployment", "rel-penstock-big")["spec"]
    assert spec["minReplicaCount"] == 0
    # Requests wait for a model that a worker has announced once, and that frontends keep.
    kept = everything.env("rel-penstock-frontend")["PENSTOCK_KEEP_MODELS"]
    assert kept == "Qwen3-8B,chat.v1,code"
    loading = float(everything.env("rel-penstock-big")["PENSTOCK_LOAD_TIMEOUT_S"])
    assert spec["initialCooldownPeriod"] >= loading
    wait, sequences = (trigger["metadata"] for trigger in spec["triggers"])
    assert wait["activationThreshold"] == "0"
    assert re.findall(r"penstock:\w+", wait["query"]) == ["penstock:queue_age_seconds"]
    assert "penstock:queue_age_seconds" in {row.name for row in DEPLOYMENT_METRICS.rows}
    of_workers = {row.name for row in WORKER_METRICS.rows}
    for kind in ("running", "waiting"):
        assert f"penstock:num_requests_{kind}" in of_workers
        assert kind in sequences["query"]
    for query in (wait["query"], sequences["query"]):
        assert 'namespace="prod",model_name="Qwen3-8B"' in query


@pytest.mark.prometheus
def test_prometheus_can_read_the_queries_and_the_rules(
    everything: Installed, tmp_path: Path
) -> None:
    spec = everything.one("ScaledObject", "rel-penstock-big")["spec"]
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    of_rules = everything.one("PrometheusRule", "rel-penstock")["spec"]
    rules = [{"record": f"scale:{number}", "expr": each} for number, each in enumerate(queries)]
    groups = [*of_rules["groups"], {"name": "scale", "rules": rules}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    written = yaml.safe_load((CHART.parents[1] / "observability/rules.yml").read_text())
    for rule in written["groups"][0]["rules"]:
        rule["annotations"]["runbook_url"] = RUNBOOKS + rule["annotations"]["runbook_url"]
    assert of_rules == written, "the rules that promtool tests"


def test_scrapes_find_processes_and_bring_their_key(everything: Installed) -> None:
    board = everything.one("ConfigMap", "rel-penstock-board")["data"]["penstock.json"]
    written = (CHART.parents[1] / "observability/grafana/penstock.json").read_text()
    assert json.loads(board) == json.loads(written)
    for name, port in (("workers", "metrics"), ("frontends", "http")):
        monitor = everything.one("PodMonitor", f"rel-penstock-{name}")
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == port
        # As the rule for targets that are down names them.
        assert endpoint["relabelings"] == [
            {"targetLabel": "job", "replacement": f"penstock-{name}"}
        ]
    scrape = everything.one("ScrapeConfig", "rel-penstock-deployment")["spec"]
    assert scrape["staticConfigs"][0]["targets"] == ["rel-penstock.prod.svc:80"]
    key = {"credentials": {"name": "scrapes", "key": "token"}}
    assert scrape["authorization"] == endpoint["authorization"] == key
    assert "PENSTOCK_METRICS_KEY" in everything.env("rel-penstock-frontend")


def test_only_who_must_reaches_whom(everything: Installed) -> None:
    redis = everything.one("NetworkPolicy", "rel-penstock-redis")["spec"]
    assert redis["egress"] == []
    (rule,) = redis["ingress"]
    allowed = [source["podSelector"]["matchLabels"] for source in rule["from"]]
    pods = {name: template["metadata"]["labels"] for name, template in everything.pods().items()}

    def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
        return selector.items() <= labels.items()

    reached = {name for name, labels in pods.items() if any(selects(s, labels) for s in allowed)}
    assert reached == set(pods) - {"rel-penstock-redis"}
    covered = {
        name: [
            policy
            for (kind, policy), made in everything.objects.items()
            if kind == "NetworkPolicy"
            and selects(made["spec"]["podSelector"]["matchLabels"], labels)
        ]
        for name, labels in pods.items()
    }
    assert covered == {
        "rel-penstock-frontend": ["rel-penstock-frontend"],
        "rel-penstock-demo": ["rel-penstock-worker"],
        "rel-penstock-big": ["rel-penstock-worker"],
        "rel-penstock-there": ["rel-penstock-worker"],
        "rel-penstock-turns": ["rel-penstock-worker"],
        "rel-penstock-redis": ["rel-penstock-redis"],
    }


MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}


def test_prometheus_reaches_every_process_and_every_process_its_collector(
    everything: Installed, smallest: Installed
) -> None:
    """At the ports where metrics are, and where spans go, of what is installed."""
    for role in ("frontend", "worker"):
        spec = everything.one("NetworkPolicy", f"rel-penstock-{role}")["spec"]
        (entry,) = spec["ingress"]
        container = everything.container(
            {"worker": "rel-penstock-demo"}.get(role, "rel-penstock-frontend")
        )
        (port,) = container["ports"]
        assert entry["ports"] == [{"port": port["containerPort"]}]
        callers = EVERYTHING["networkPolicy"]["frontendFrom"] if role == "frontend" else []
        assert entry["from"] == [*callers, MONITORING]
        to = EVERYTHING["networkPolicy"]["collectorTo"]
        assert {"ports": [{"port": 4318}], "to": to} in spec["egress"]
        without = smallest.one("NetworkPolicy", f"rel-penstock-{role}")["spec"]
        assert 4318 not in [port["port"] for rule in without["egress"] for port in rule["ports"]]
    # Nobody is named: all who reach the frontends, Prometheus too.
    assert smallest.one("NetworkPolicy", "rel-penstock-frontend")["spec"]["ingress"] == [
        {"ports": [{"port": 8000}]}
    ]
    for name in ("rel-penstock-frontend", "rel-penstock-demo", "rel-penstock-big"):
        env = everything.env(name)
        assert env.keys() >= OF_TRACING
        assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.traces.svc:4318"
        assert env["OTEL_TRACES_SAMPLER_ARG"] == "0.25"
        assert not OF_TRACING & smallest.env("rel-penstock-demo").keys()


@pytest.mark.parametrize(
    ("endpoint", "values", "port"),
    [
        ("https://otlp.example.org/v1", {}, 443),
        ("http://collector", {}, 80),
        ("http://collector:80", {"collectorPort": 4318}, 4318),
    ],
)
def test_the_collectors_port_is_that_of_its_pods(
    endpoint: str, values: dict[str, Any], port: int
) -> None:
    given = {"tracing": {"endpoint": endpoint}, "networkPolicy": values}
    installed = Installed({"allowWithoutKeys": True, **given})
    assert installed.error == ""
    for role in ("frontend", "worker"):
        spec = installed.one("NetworkPolicy", f"rel-penstock-{role}")["spec"]
        assert {"ports": [{"port": port}]} in [rule for rule in spec["egress"] if "to" not in rule]


def test_a_redis_outside_is_used_as_it_is_named() -> None:
    url = "rediss://user:pw@redis.example.org:6380/0"
    values = {"bundled": False, "external": {"url": url, "port": 6380}}
    installed = Installed({"allowWithoutKeys": True, "redis": values})
    assert not [name for kind, name in installed.objects if kind == "StatefulSet"]
    for name in ("rel-penstock-frontend", "rel-penstock-demo"):
        assert installed.env(name)["PENSTOCK_REDIS_URL"] == url
    egress = installed.one("NetworkPolicy", "rel-penstock-frontend")["spec"]["egress"]
    assert {"ports": [{"port": 6380}]} in egress
    values = {"bundled": False, "external": {"existingSecret": "redis"}}
    installed = Installed({"allowWithoutKeys": True, "redis": values})
    (entry,) = (
        each
        for each in installed.container("rel-penstock-demo")["env"]
        if each["name"] == "PENSTOCK_REDIS_URL"
    )
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "url"}


def test_keys_reach_frontends_as_a_secret(everything: Installed, smallest: Installed) -> None:
    secret = everything.one("Secret", "rel-penstock-keys")["stringData"]["keys"]
    assert secret == "sha256:00 tenant=a\nsha256:11 tenant=b"
    assert "PENSTOCK_ALLOW_WITHOUT_KEYS" not in everything.env("rel-penstock-frontend")
    assert smallest.env("rel-penstock-frontend")["PENSTOCK_ALLOW_WITHOUT_KEYS"] == "true"
    password = smallest.one("Secret", "rel-penstock-redis")["stringData"]["password"]
    assert re.fullmatch(r"[A-Za-z0-9]{32}", password)
