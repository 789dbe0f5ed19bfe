"""As much of a Kubernetes API as Helm speaks to: discovery, and objects that are kept.

It validates nothing and runs nothing. What it is sent is what Helm made of a chart.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import yaml

# (group version, kind, name in paths)
RESOURCES = (
    ("v1", "Secret", "secrets"),
    ("v1", "ConfigMap", "configmaps"),
    ("v1", "Service", "services"),
    ("v1", "ServiceAccount", "serviceaccounts"),
    ("v1", "Pod", "pods"),
    ("apps/v1", "Deployment", "deployments"),
    ("apps/v1", "StatefulSet", "statefulsets"),
    ("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    ("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ("networking.k8s.io/v1", "Ingress", "ingresses"),
    ("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    ("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    ("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig", "scrapeconfigs"),
)
KINDS = {(version, plural): kind for version, kind, plural in RESOURCES}


class KubernetesApi:
    """`with KubernetesApi() as api:`; `objects` has what was created, by kind and name."""

    def __init__(self, version: str = "1.33") -> None:
        self.version = version
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def kubeconfig(self) -> str:
        """Returns the configuration of a client of this API, as a document."""
        cluster = {"name": "c", "cluster": {"server": self.url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "contexts": [context],
                "users": [{"name": "u", "user": {}}],
                "current-context": "c",
            }
        )

    def __enter__(self) -> KubernetesApi:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Returns the status and document for one request."""
        parts = [part for part in path.partition("?")[0].split("/") if part]
        found = self._discovered(parts)
        if method == "GET" and found is not None:
            return 200, found
        group = parts[1] if parts[0] == "api" else f"{parts[1]}/{parts[2]}"
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[:1] == ["namespaces"]:
            rest = rest[2:]
        kind = KINDS[group, rest[0]]
        if method == "POST":
            made: dict[str, Any] = json.loads(body)
            self.objects[kind, made["metadata"]["name"]] = made
            return 201, made
        if len(rest) == 1:
            items = [each for (of, _), each in self.objects.items() if of == kind]
            return 200, {"apiVersion": group, "kind": f"{kind}List", "metadata": {}, "items": items}
        if method == "GET" and (kind, rest[1]) in self.objects:
            return 200, self.objects[kind, rest[1]]
        if method in ("PUT", "PATCH"):
            changed: dict[str, Any] = self.objects.get((kind, rest[1]), {}) | json.loads(body)
            self.objects[kind, rest[1]] = changed
            return 200, changed
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}
        return 404, {**status, "reason": "NotFound", "message": "not found"}

    def _discovered(self, parts: list[str]) -> dict[str, Any] | None:
        versions = sorted({version for version, _, _ in RESOURCES})
        if parts == ["version"]:
            major, minor = self.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            groups: dict[str, list[dict[str, str]]] = {}
            for version in versions:
                name, slash, number = version.partition("/")
                if slash:
                    groups.setdefault(name, []).append({"groupVersion": version, "version": number})
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [
                    {"name": name, "versions": of, "preferredVersion": of[0]}
                    for name, of in groups.items()
                ],
            }
        version = "/".join(parts[1:])
        if parts[0] not in ("api", "apis") or version not in versions:
            return None
        verbs = ["create", "get", "list", "patch", "update", "delete"]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": [
                {
                    "name": plural,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": verbs,
                }
                for of, kind, plural in RESOURCES
                if of == version
            ],
        }


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, document = api.answer(self.command, self.path, body)
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

    return Handler
