"""`helm upgrade` by the lines of its page, carried out to processes under running streams.

Helm itself makes the objects; tests.support.rollout runs them, with what it leaves out. Both
releases are this checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client
from tests.support.kubernetes_api import KubernetesApi
from tests.support.operator_pages import lines_of
from tests.support.operator_walk import Answer
from tests.support.pinned_environment import pinned_environment
from tests.support.polling import wait_until
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.rollout import Cluster

pytestmark = [pytest.mark.packages, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "deploy/helm/penstock"
OLD, NEW = "0.0.9", "0.1.0"
FRONTENDS, WORKERS = "rel-penstock-frontend", "rel-penstock-demo"
ROLLOUT_S = 120.0
NUM_READERS = 3
ECHO = [
    {"name": "PENSTOCK_RUNNER", "value": "echo"},
    {"name": "PENSTOCK_ECHO_STEP_MS", "value": "10"},
]


def changed(values: dict[str, Any], line: str) -> dict[str, Any]:
    """Returns values as `--reset-then-reuse-values` and the `--set` of a line have them."""
    assert "--reset-then-reuse-values" in line.split()
    (given,) = re.findall(r"--set (\S+)", line)
    made = dict(values)
    for assignment in given.split(","):
        place, value = assignment.split("=")
        part, name = place.split(".")
        made[part] = {**made.get(part, {}), name: {"OLD": OLD, "NEW": NEW}[value]}
    return made


class Readers:
    """Clients whose answers follow each other, each checked to be whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ends = threading.Event()
        self.jobs: list[str] = []

    def __enter__(self) -> Readers:
        self._threads = ThreadPoolExecutor(NUM_READERS)
        self._reading = [self._threads.submit(self._read) for _ in range(NUM_READERS)]
        wait_until(lambda: len(self.jobs) >= NUM_READERS, "the first answers")
        return self

    def _read(self) -> None:
        with Client(self._url) as client:
            while not self._ends.is_set():
                answer = Answer(client)
                self.jobs.append(answer.job)
                answer.expect_whole()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for reading in self._reading:
            reading.result()
        self._threads.shutdown()


class Helm:
    """Releases one chart after the other, in one process that remembers the release."""

    def __init__(self, kubeconfig: str) -> None:
        python = pinned_environment(HERE / "helm.txt", "helm", for_any_python=True) / "bin/python"
        self._process = subprocess.Popen(
            [str(python), str(HERE / "helm_calls.py"), "releases", "rel", "prod"],
            env={**os.environ, "HELM_DRIVER": "memory"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(kubeconfig)

    def release(self, chart: Path, values: dict[str, Any]) -> None:
        self._write({"chart": str(chart), "values": values})
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer

    def _write(self, given: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def old_chart(tmp_path: Path) -> Path:
    """The chart as a release before this one's."""
    chart = tmp_path / "old/penstock"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    text = file.read_text()
    assert text.count(NEW) == 2
    file.write_text(text.replace(NEW, OLD))
    return chart


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with closing(Cluster(tmp_path)) as made:
        yield made


def test_streams_through_both_upgrades_of_the_page_lose_and_double_no_token(
    cluster: Cluster,
    old_chart: Path,
    redis_url: str,  # noqa: F811
) -> None:
    """An answer takes longer than its frontend and its worker have to end it."""
    space = {"name": "PENSTOCK_NAMESPACE", "value": new_namespace()}
    values: dict[str, Any] = {
        "allowWithoutKeys": True,
        "redis": {"bundled": False, "external": {"url": redis_url}},
        "frontend": {"shutdownTimeoutSeconds": 2, "extraEnv": [space]},
        "workers": {"drainTimeoutSeconds": 2, "replicas": 2, "extraEnv": [*ECHO, space]},
    }
    tags = {FRONTENDS: OLD, WORKERS: OLD}
    lines = [line for line in lines_of("upgrade") if line.startswith("helm upgrade ")]
    with KubernetesApi() as api, closing(Helm(api.kubeconfig())) as helm:
        helm.release(old_chart, values)
        cluster.apply(api.objects, ROLLOUT_S)
        for line, upgraded in zip(lines, (WORKERS, FRONTENDS), strict=True):
            before = {name: cluster.pods(name) for name in tags}
            values, tags[upgraded] = changed(values, line), NEW
            with Readers(cluster.url) as readers:
                helm.release(CHART, values)
                cluster.apply(api.objects, ROLLOUT_S)
            for name, tag in tags.items():
                assert [pod.tag for pod in cluster.pods(name)] == [tag, tag]
                assert (cluster.pods(name) != before[name]) == (name == upgraded)
            with Client(cluster.url) as client:
                jobs = [client.call("GET", f"/v1/jobs/{job}") for job in readers.jobs]
            is_handed_over = any(job["attempt"] > 1 for job in jobs)
            assert is_handed_over == (upgraded == WORKERS)
