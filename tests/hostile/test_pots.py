"""One tenant fills a pot of a frontend; another one's requests all succeed, about as fast.

The pots are those of `docs/guides/operate/secure.md`, "What tenants share". Success is asserted
for every request; times are ratios to the calm period of the same run, with slack for a machine
that others use.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from tests.hostile.conftest import METRICS_KEY
from tests.hostile.fillers import FILLERS, QUESTION, filled
from tests.neighbours.bystanders import Bystanders, Notice
from tests.neighbours.conftest import Shared
from tests.neighbours.test_neighbours import MODEL, recorded_bystanders

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

OF_METRICS = {"authorization": f"Bearer {METRICS_KEY}"}
WATCH_S = 4.0  # of calm, and of each storm: two streams of each of the five bystanders
MAX_RATIO = 10  # 2 is what it should be, and what a machine of its own measures


async def calm_of(service: Shared, bystanders: Bystanders) -> Notice:
    if not service.calm:
        async with bystanders.watching() as calm:
            await asyncio.sleep(WATCH_S)
        assert calm.faults == [], calm
        service.calm.append(calm)
    return service.calm[0]


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


@pytest.mark.promise(
    "Neighbours: a tenant that fills a bound of a frontend (open responses, sockets, dashboards, "
    "uploads, bodies, answers, waiting text) is refused alone; every request of another succeeds"
)
@pytest.mark.parametrize("pot", FILLERS)
async def test_who_fills_a_pot_is_refused_alone(small_pots: Shared, pot: str) -> None:
    url = small_pots.penstock.base_url
    async with recorded_bystanders(small_pots, f"pot{pot}") as bystanders:
        calm = await calm_of(small_pots, bystanders)
        async with filled(pot, url, small_pots.worst_key, MODEL) as refusals:
            async with bystanders.watching() as storm:
                await innocent(small_pots, pot)
                await asyncio.sleep(WATCH_S)
            async with httpx.AsyncClient(base_url=url, headers=OF_METRICS) as http:
                text = (await http.get("/metrics")).text
    print(f"\n{pot}: {dict(refusals)}\n  calm:  {calm}\n  storm: {storm}")
    assert set(refusals) == {"429 tenant_share_exceeded"}
    assert refused(text, pot) > 0
    assert pots_of(text) == set(FILLERS)
    assert storm.faults == []
    assert len(storm.worst_gap_s) >= 5, "nobody was served meanwhile"
    first = p95(storm.first_token_s) / p95(calm.first_token_s)
    gap = max(storm.worst_gap_s) / max(calm.worst_gap_s)
    print(f"  p95 of the first token {first:.2f} times, worst gap {gap:.2f} times")
    assert first <= MAX_RATIO
    assert gap <= MAX_RATIO


def pots_of(text: str) -> set[str]:
    """Returns the names of all pots in a scrape of the frontend."""
    families = text_string_to_metric_families(text)
    found = (sample for family in families for sample in family.samples)
    return {sample.labels["pot"] for sample in found if sample.name == "penstock:pot_limit"}


def refused(text: str, pot: str) -> float:
    """Returns how many requests a scrape of the frontend says that the pot has refused."""
    families = text_string_to_metric_families(text)
    found = (sample for family in families for sample in family.samples)
    return sum(
        sample.value
        for sample in found
        if sample.name == "penstock:pot_refused_total" and sample.labels == {"pot": pot}
    )


async def innocent(service: Shared, pot: str) -> None:
    """Does what the filler does, once, as the other tenant."""
    headers = {"authorization": f"Bearer {service.quiet_key}"}
    base_url = service.penstock.base_url
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=60) as http:
        if pot == "websockets":
            url = base_url.replace("http", "ws", 1) + "/v1/responses"
            async with connect(url, additional_headers=headers):
                return
        if pot in ("dashboards", "dashboard_views"):
            async with http.stream("GET", "/v1/deployment/stream") as response:
                assert response.status_code == 200, await response.aread()
            return
        if pot == "uploads":
            answer = await http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("f", b"{}\n")}
            )
        elif pot.endswith("text_bytes"):
            words = 12_000 if pot == "small_text_bytes" else 40_000
            answer = await http.post("/tokenize", json={"model": MODEL, "prompt": "word " * words})
        else:
            body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 8}
            answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


def test_every_pot_has_its_filler_and_its_row_in_the_guide() -> None:
    guide = Path("docs/guides/operate/secure.md").read_text()
    assert [pot for pot in FILLERS if f"`{pot}`" not in guide] == []
