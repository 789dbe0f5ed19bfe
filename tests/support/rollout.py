"""Deployments of a rendered chart, rolled out as Kubernetes does, with pods that are processes.

A pod has the command and environment of its image's Dockerfile and of its template, the template's
readiness probe, preStop and grace period. The Service is a proxy before the pods that are ready.
Not here: images, volumes, limits, users, secrets, startup and liveness probes, pods that fail. All
pods run this checkout, at ports of their own, whatever their image's tag.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from shared.process import dying_with_this_process
from tests.support.cutting_proxy import CuttingProxy
from tests.support.launched import REPOSITORY, free_port

DOCKERFILES = {"penstock-api": "api/Dockerfile", "penstock-worker": "worker/Dockerfile"}
PATHS = {"HOME", "PYTHONPATH", "TRITON_CACHE_DIR"}  # in the image
PORTS = {"http": "PENSTOCK_PORT", "metrics": "PENSTOCK_METRICS_PORT"}
POLL_S = 0.1
# From a pod's end to the last node that sends it no connection any more.
ENDPOINTS_S = 2.0


def _image(name: str) -> tuple[list[str], dict[str, str]]:
    """Returns command and environment of the last stage of an image's Dockerfile."""
    text = (REPOSITORY / DOCKERFILES[name]).read_text().rpartition("\nFROM ")[2]
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.M)
    words = [word for line in re.findall(r"^ENV (.*)$", text, re.M) for word in shlex.split(line)]
    env = dict(word.split("=", 1) for word in words)
    return json.loads(command), {name: env[name] for name in env.keys() - PATHS}


class Pod:
    """A process by a pod's template."""

    def __init__(self, template: Mapping[str, Any], log: Path) -> None:
        self.template = template
        self.is_ready = self.is_stopping = False
        self.port = free_port()
        self._log = log
        (self._container,) = template["spec"]["containers"]
        (port,) = self._container["ports"]
        (program, *arguments), env = _image(self._container["image"].partition(":")[0])
        assert program == "python"
        env |= {each["name"]: each["value"] for each in self._container["env"]}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPOSITORY,
                env={**os.environ, **env, PORTS[port["name"]]: str(self.port)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=dying_with_this_process(),
            )

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def tag(self) -> str:
        return str(self._container["image"].partition(":")[2])

    def probe(self) -> None:
        """Looks whether it is ready. Fails where its process has ended."""
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        path = self._container["readinessProbe"]["httpGet"]["path"]
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)
            self.is_ready = answer.status_code == 200
        except httpx.TransportError:
            self.is_ready = False

    def stop(self) -> None:
        """Ends it as a kubelet does. Fails where it would have to be killed."""
        end_s = time.monotonic() + self.template["spec"]["terminationGracePeriodSeconds"]
        hook = self._container.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        with subprocess.Popen(hook.get("command", ["true"])):
            time.sleep(ENDPOINTS_S if hook else 0)
            self.is_ready = False
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(max(0, end_s - time.monotonic())) == 0, self._log.read_text()


class Cluster:
    """Runs Deployments. `url` is the one Service."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pods: dict[str, list[Pod]] = defaultdict(list)
        self._selector: Mapping[str, str] = {}
        self._numbers = itertools.count(1)
        self._stopping: list[Future[None]] = []
        self._threads = ThreadPoolExecutor(16)
        self._service = CuttingProxy(self._endpoint)
        self.url = self._service.base_url

    def pods(self, name: str) -> list[Pod]:
        """Returns the pods of a Deployment that are not stopping."""
        return [pod for pod in self._pods[name] if not pod.is_stopping]

    def apply(self, objects: Mapping[tuple[str, str], Mapping[str, Any]], timeout_s: float) -> None:
        """Rolls out the Deployments among objects by kind and name. Returns when all pods have
        their new templates and the others have ended."""
        (service,) = (each for (kind, _), each in objects.items() if kind == "Service")
        self._selector = service["spec"]["selector"]
        deployments = {name: each for (kind, name), each in objects.items() if kind == "Deployment"}
        end_s = time.monotonic() + timeout_s
        while True:
            done = [self._advance(name, each["spec"]) for name, each in deployments.items()]
            if all(done):
                break
            assert time.monotonic() < end_s, "the rollout takes too long"
            time.sleep(POLL_S)
        for stopping in self._stopping:
            stopping.result()
        self._stopping.clear()

    def close(self) -> None:
        self._service.close()
        for pod in itertools.chain(*self._pods.values()):
            pod.process.kill()
            pod.process.wait()
        self._threads.shutdown()

    def _advance(self, name: str, spec: Mapping[str, Any]) -> bool:
        """Starts or stops a pod, as the strategy allows. Returns whether nothing is left to do."""
        pods, wanted = self.pods(name), spec["replicas"]
        rolling = spec["strategy"]["rollingUpdate"]
        for pod in pods:
            pod.probe()
        new = [pod for pod in pods if pod.template == spec["template"]]
        old = [pod for pod in pods if pod not in new]
        num_ready = sum(pod.is_ready for pod in pods)
        if len(new) < wanted and len(pods) < wanted + rolling["maxSurge"]:
            log = self._directory / f"{name}-{next(self._numbers)}.log"
            self._pods[name].append(Pod(spec["template"], log))
        elif old and num_ready > wanted - rolling["maxUnavailable"]:
            old[0].is_stopping = True
            self._stopping.append(self._threads.submit(old[0].stop))
        return not old and num_ready == wanted

    def _endpoint(self) -> tuple[str, int]:
        ready = [
            pod
            for pod in itertools.chain(*self._pods.values())
            if pod.is_ready and self._selector.items() <= pod.labels.items()
        ]
        return "127.0.0.1", ready[next(self._numbers) % len(ready)].port
