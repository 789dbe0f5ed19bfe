"""What each tenant used and was refused: one account, over frontends and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.checkpoints import make_checkpoint
from tests.support.keys import Keys
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import RunningService, running_frontend, wait_until
from tests.support.service_processes import MODEL, worker_process

KEYS = Keys(acme="", bolt="requests_per_minute=1", operator="tenant=house operator")
SLOW_CPU_SECONDS = 0.1  # that the masks of 256 tokens take at least
SLOW = "start: s\ns: s s | /[a-z ]/\n"


@pytest.fixture(scope="module")
def frontend(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningService]:
    directory, namespace = tmp_path_factory.mktemp("accounts"), new_namespace()
    checkpoint, files = make_checkpoint(directory / "checkpoint"), str(directory / "files")
    engine = {"RUNNER": "model", "DEVICE": "cpu", "CPU_TIER": "reference", "DRAIN_TIMEOUT_S": "1"}
    with (
        worker_process(redis_url, namespace, checkpoint, directory / "log", **engine),
        running_frontend(redis_url, namespace, files_dir=files, api_keys=KEYS.lines) as frontend,
    ):
        frontend.until_ready()
        yield frontend


def generate(frontend: RunningService, name: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{frontend.base_url}/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "a"}], **body},
        headers={"authorization": f"Bearer {KEYS[name]}"},
        timeout=60,
    )


def metric(frontend: RunningService, name: str) -> dict[str, float]:
    """By tenant."""
    scraped = httpx.get(
        f"{frontend.base_url}/metrics/deployment",
        headers={"authorization": f"Bearer {KEYS['operator']}"},
    )
    return {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(scraped.text)
        for sample in family.samples
        if sample.name == name
    }


def cpu_s(frontend: RunningService) -> float:
    return metric(frontend, "penstock:tenant_cpu_seconds_total").get("acme", 0.0)


@pytest.mark.promise(
    "Neighbours: processor seconds of text, grammars and masks and refused requests are charged to "
    "the tenant that asked, also where the request fails; who used most goes last at the text "
    "threads, for a bounded time"
)
def test_grammars_text_and_masks_are_charged_to_who_asked_for_them(
    frontend: RunningService,
) -> None:
    accounts = frontend.app.state.services.metrics.accounts

    def of_frontend_s() -> float:
        return accounts._reported_us["acme"] / 1e6

    refused = generate(frontend, "acme", structured_outputs={"grammar": "start: unknown"})
    assert refused.status_code == 400, refused.text
    wait_until(lambda: of_frontend_s() > 0, "the frontend's report")
    wait_until(lambda: cpu_s(frontend) >= of_frontend_s() > 0, "the account of a refused grammar")
    admission_s = cpu_s(frontend)
    plain = generate(frontend, "acme", max_tokens=4)
    assert plain.status_code == 200, plain.text
    slow = generate(frontend, "acme", structured_outputs={"grammar": SLOW}, ignore_eos=True)
    assert slow.status_code in (200, 500), "it may be given up for its masks"
    wait_until(lambda: of_frontend_s() > admission_s, "the frontend's report")
    wait_until(lambda: cpu_s(frontend) >= of_frontend_s() + SLOW_CPU_SECONDS, "the masks")
    assert metric(frontend, "penstock:tenant_cpu_seconds_total").keys() <= {"acme", ""}


def test_refused_requests_are_counted_for_their_tenant(frontend: RunningService) -> None:
    answers = [generate(frontend, "bolt", max_tokens=1).status_code for _ in range(4)]
    assert answers == [200, 429, 429, 429]
    assert generate(frontend, "bolt", max_tokens=-1).status_code == 400, "an error is no refusal"
    name = "penstock:tenant_refused_total"
    wait_until(lambda: bool(metric(frontend, name)), "the frontend's report")
    assert metric(frontend, name) == {"bolt": 3}


def test_operators_see_the_accounts_first_among_who_holds_what(frontend: RunningService) -> None:
    wait_until(lambda: cpu_s(frontend) > 0, "an account")
    with httpx.stream(
        "GET",
        f"{frontend.base_url}/v1/deployment/stream",
        headers={"authorization": f"Bearer {KEYS['operator']}"},
        timeout=60,
    ) as stream:
        text = ""
        for piece in stream.iter_text():
            text += piece
            if "refused_requests" in text and text.endswith("\n\n"):
                break
    text = text[text.index("all/cpu_seconds") :]  # an event before the first report has none
    assert text.index("all/refused_requests") < text.index("/websockets")
