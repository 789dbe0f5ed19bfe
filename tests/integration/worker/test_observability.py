"""The board and the alerts, asked of a Prometheus that scrapes a real deployment."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.metrics import Metrics
from penstock.launcher.redis_server import PrivateServer
from shared.metrics import MetricsNames
from shared.process import dying_with_this_process
from tests.support.launched import free_port
from tests.support.redis_server import new_namespace
from tests.support.running_service import wait_until
from tests.support.service_processes import REPOSITORY, process, worker_process

pytestmark = pytest.mark.prometheus

FILES = REPOSITORY / "deploy/observability"
BOARD = json.loads((FILES / "grafana/penstock.json").read_text())
RULES = yaml.safe_load((FILES / "rules.yml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule["expr"] for rule in RULES}
QUERIES = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in BOARD["panels"]
    for target in panel.get("targets", ())
}


class Prometheus:
    """A server that scrapes each second what it is given."""

    def __init__(self, directory: Path, frontends: list[str], workers: list[str]) -> None:
        config = yaml.safe_load((FILES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        del config["rule_files"]
        targets = {
            "penstock-frontends": frontends,
            "penstock-workers": workers,
            "penstock-deployment": frontends[:1],
        }
        for job in config["scrape_configs"]:
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = (directory / "log").open("wb")
        self._popen = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        )

    def ask(self, query: str) -> list[Any]:
        """Returns the samples of an instant query; none before the server answers."""
        try:
            answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=10)
        except httpx.TransportError:
            return []
        if answer.status_code == 503:
            return []
        body = answer.json()
        assert body["status"] == "success", body
        found: list[Any] = body["data"]["result"]
        return found

    def stop(self) -> None:
        self._popen.kill()
        self._popen.wait(30)
        self._log.close()


def of_board(expression: str) -> str:
    """Returns a query of the board with what Grafana puts in for its variables."""
    return re.sub(r"\$(model|worker)", ".*", expression.replace("$__rate_interval", "1m"))


class Watched:
    """A deployment of one frontend and two workers, with its Redis, watched by a Prometheus."""

    def __init__(self, stack: ExitStack, checkpoint: Path, directory: Path) -> None:
        # A socket has a short path.
        self.redis = PrivateServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        url = self.redis.start()
        stack.callback(self.redis.stop)
        port, namespace = free_port(2), new_namespace()
        self.workers = [
            stack.enter_context(
                worker_process(
                    url,
                    namespace,
                    checkpoint,
                    directory / f"{port + n}.log",
                    METRICS_PORT=str(port + n),
                    ECHO_STEP_MS="5",
                    LEASE_MS="1500",
                )
            )
            for n in range(2)
        ]
        self.frontend = stack.enter_context(process(url, namespace))
        frontends = [self.frontend.base_url.removeprefix("http://")]
        ports = [f"127.0.0.1:{port + n}" for n in range(2)]
        self.prometheus = Prometheus(directory, frontends, ports)
        stack.callback(self.prometheus.stop)

    def generate(self, timeout_s: float = 60.0) -> httpx.Response:
        body = {"prompt": "the level of the water " * 4, "max_tokens": 8, "stream": False}
        return httpx.post(f"{self.frontend.base_url}/generate", json=body, timeout=timeout_s)

    def fires(self, alert: str) -> bool:
        return bool(self.prometheus.ask(ALERTS[alert]))


@pytest.fixture
def watched(checkpoint: Path, tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        made = Watched(stack, checkpoint, tmp_path)
        workers = "penstock:model_workers"
        wait_until(
            lambda: [r["value"][1] for r in made.prometheus.ask(workers)] == ["2"], "workers", 60
        )
        yield made


def test_each_query_has_an_answer_and_each_alert_fires_for_its_fault(watched: Watched) -> None:
    """In one deployment, since each takes seconds to start: well, then ever more broken."""
    missing = set(QUERIES)

    def all_answered() -> bool:
        assert watched.generate().status_code == 200
        answered = {n for n in missing if watched.prometheus.ask(of_board(QUERIES[n]))}
        missing.difference_update(answered)
        return not missing

    try:
        wait_until(all_answered, "answers to all queries", 40)
    except AssertionError:
        raise AssertionError(f"nothing answers {sorted(missing)}") from None
    assert {alert for alert in ALERTS if watched.fires(alert)} == set(), "all is well"

    watched.workers[0].signal(signal.SIGKILL)
    wait_until(lambda: watched.fires("PenstockTargetDown"), "the alert of a target", 30)
    assert not watched.fires("PenstockNoWorker"), "the other one is there"

    watched.workers[1].signal(signal.SIGKILL)
    one_left = "penstock:model_workers == 0"
    wait_until(lambda: bool(watched.prometheus.ask(one_left)), "no live worker", 30)
    with pytest.raises(httpx.TimeoutException):
        watched.generate(timeout_s=0.5)
    # The client is gone, and with it the job: one that stays is needed.
    body = {"model": "tiny", "input": "a", "background": True}
    url = f"{watched.frontend.base_url}/v1/responses"
    assert httpx.post(url, json=body, timeout=30).status_code == 200
    wait_until(lambda: watched.fires("PenstockNoWorker"), "the alert of no worker", 30)
    early = ALERTS["PenstockQueueWait"].replace("> 60", "> 2")
    assert early != ALERTS["PenstockQueueWait"]
    wait_until(lambda: bool(watched.prometheus.ask(early)), "the alert of the queue", 30)

    watched.redis.stop()
    wait_until(lambda: watched.fires("PenstockRedisDown"), "the alert of Redis", 40)
    wait_until(lambda: watched.fires("PenstockDeploymentUnknown"), "no state", 40)


def test_alerts_that_need_time_or_a_broken_device_fire_as_written() -> None:
    """promtool plays series and asks for the alerts after their `for`."""
    promtool = shutil.which("promtool")
    assert promtool is not None
    ended = subprocess.run(
        [promtool, "test", "rules", str(FILES / "rules_test.yml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    played = yaml.safe_load((FILES / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in played
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert fired == set(ALERTS)


def test_every_bound_of_the_alerts_is_a_bucket_of_the_exposition() -> None:
    metrics = Metrics(MetricsNames.PENSTOCK)
    for num_prompt_tokens in (100, 5_000, 50_000):
        metrics.first_token("chat", "m", num_prompt_tokens, 0.1)
    exposed = metrics.exposition.text().decode()
    asked = re.findall(
        r'(\w+:\w+_bucket)\{prompt="(\w+)",le=(~?)"([^"]+)"', "".join(ALERTS.values())
    )
    assert {prompt for _, prompt, _, _ in asked} == {"short", "medium", "long"}
    for name, prompt, is_pattern, bound in asked:
        pattern = bound.replace("\\\\", "\\") if is_pattern else re.escape(bound)
        series = re.escape(name) + r"\{[^}]*"
        found = [
            line
            for line in exposed.splitlines()
            if f'prompt="{prompt}"' in line and re.match(f'{series}le="{pattern}"', line)
        ]
        assert found, (name, prompt, bound)


def test_every_alert_names_its_row_of_the_troubleshooting_page() -> None:
    page, _, _ = RULES[0]["annotations"]["runbook_url"].partition("#")
    rows = re.findall(r'^\| <a id="(\w+)"></a>`(\w+)` \|', (REPOSITORY / page).read_text(), re.M)
    assert rows == [(alert.lower(), alert) for alert in ALERTS]
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"
