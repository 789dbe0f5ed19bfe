"""What is read for the views: each list once in a round, and no more of it than is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from api.deployment.reader import MAX_BATCHES, MAX_TENANTS, DeploymentReader
from api.deployment.view import ViewKey
from api.system.protocol import LoadingWorker, ModelLoad
from shared.messages import JobState
from shared.transport.ports.admission import AdmissionLimits
from shared.transport.ports.dead_letters import DeadLetter, Requeued
from shared.transport.ports.deployment import (
    History,
    HistorySlot,
    ProcessKind,
    ProcessReport,
    TenantLoad,
)
from shared.transport.ports.job_search import JobFilter, JobPage
from shared.transport.ports.registry import WorkerStatus
from tests.unit.api.jobs.relay_fakes import record_of


class Fakes:
    """All that a reader reads from, counting the reads."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.letter: DeadLetter | Requeued | None = None
        self.state = JobState.FAILED
        self.frontends: list[ProcessReport] = []

    async def find(self, wanted: JobFilter, limit: int, max_searched: int) -> JobPage:
        self.reads.append("jobs")
        return JobPage([record_of(JobState.QUEUED)], None, 1)

    async def get(self, job_id: str) -> Any:
        self.reads.append("get")
        return record_of(self.state) if job_id == "0-x" else self.letter

    async def list(self, *arguments: Any) -> list[Any]:
        self.reads.append("list")
        return []

    async def list_open(self, limit: int) -> list[Any]:
        self.reads.append("list_open")
        assert limit <= MAX_BATCHES
        return []

    async def tenants(self, names: Any) -> list[TenantLoad]:
        self.reads.append("tenants")
        return [TenantLoad(name, queued=int(name[1:])) for name in names]

    async def reports(self, kind: ProcessKind, limit: int) -> list[ProcessReport]:
        self.reads.append(kind)
        return self.frontends

    async def history(self, num_slots: int, slot_s: int) -> History:
        self.reads.append("history")
        return History(60.0, [HistorySlot(2)])


def reader_of(fakes: Fakes) -> DeploymentReader:
    worker = WorkerStatus("w1", ("m",), 0.1, draining=False, stalled=False, stats={"tok_s": 2.5})
    report = SimpleNamespace(status="ok", running=0, waiting=0, queued_tokens=0, redis={})
    loading = LoadingWorker(id="w2", model="m", stage="warming up", percent=43, report_age_ms=9)
    parts_of_health = {"workers": [worker], "loading": [loading], "queue": None}
    loads = {"m": ModelLoad(waiting=3, workers=1), "gone": ModelLoad(waiting=2, workers=0)}
    health = SimpleNamespace(**parts_of_health, report=lambda: report, models=lambda: loads)
    letters = SimpleNamespace(list=fakes.list, get=lambda job_id: fakes.get("letter"))
    ring = SimpleNamespace(tenants=[f"t{number}" for number in range(80)])
    parts: Any = (fakes, fakes, letters, fakes, fakes, health, SimpleNamespace(known={}), ring)
    return DeploymentReader(*parts, lambda tenant: AdmissionLimits(max_jobs_per_tenant=5))


ALL = ViewKey(None, "default")


async def test_models_are_shown_with_their_workers_and_queues_to_operators() -> None:
    reader = reader_of(Fakes())
    models = dict((await reader.content(ALL)).lists["models"])
    assert list(models) == ["gone", "m"]
    assert (models["gone"]["is_served"], models["gone"]["queued"]) == (False, 2)
    assert (models["m"]["is_served"], models["m"]["tokens_per_s"]) == (True, 2.5)
    theirs = await reader.content(ViewKey("t1", "t1", is_operator=False))
    assert theirs.lists["tenants"][0][1]["cpu_share"] is None
    assert dict(theirs.lists["models"])["m"] == {
        "model": "m",
        "workers": 1,
        "is_served": True,
        "is_paused": False,
    }


async def test_a_worker_that_loads_is_shown_beside_those_that_serve() -> None:
    content = await reader_of(Fakes()).content(ALL)
    told = [(name, worker["status"]) for name, worker in content.lists["workers"]]
    assert told == [("w1", "ok"), ("w2", "loading")]
    loading = content.lists["workers"][1][1]
    assert (loading["models"], loading["percent"], loading["stage"]) == (
        ["m"],
        43,
        "warming up",
    )


async def test_views_share_what_is_read_and_what_changes_seldom_is_read_seldom() -> None:
    fakes = Fakes()
    reader = reader_of(fakes)
    reader.begin_round()
    for state in (None, JobState.RUNNING, JobState.FAILED):
        await reader.content(ViewKey(None, "default", JobFilter(state)))
    assert fakes.reads.count("jobs") == 3
    for name in ("tenants", "history", "list_open", ProcessKind.FRONTEND):
        assert fakes.reads.count(name) == 1, name
    reader.begin_round()  # at once: two seconds have not passed
    await reader.content(ALL)
    assert fakes.reads.count("tenants") == 1
    assert fakes.reads.count("jobs") == 4


async def test_the_busiest_tenants_are_shown_and_of_a_tenant_its_own() -> None:
    reader = reader_of(Fakes())
    tenants = dict((await reader.content(ALL)).lists["tenants"])
    assert list(tenants) == [f"t{number}" for number in range(79, 79 - MAX_TENANTS, -1)]
    assert tenants["t79"]["limits"]["max_jobs"] == 5
    own = await reader.content(ViewKey("t7", "t7"))
    assert [name for name, _ in own.lists["tenants"]] == ["t7"]


async def test_holdings_are_shown_only_to_operators() -> None:
    fakes = Fakes()
    pots = [
        {"pot": "uploads", "used": 1, "limit": 16, "refused": 0, "holders": [["t1", 1]]},
        {"pot": "websockets", "used": 3, "limit": 4, "refused": 9, "holders": [["t2", 3]]},
    ]
    stats = {"host": "h", "port": "1", "pots": msgspec.json.encode(pots).decode()}
    fakes.frontends = [
        ProcessReport("fe-1", 0.5, stats),
        ProcessReport("fe-old", 0.5, {"port": "1"}),
    ]
    reader = reader_of(fakes)
    lists = (await reader.content(ALL)).lists
    assert [(name, row["holders"]) for name, row in lists["pots"]] == [
        ("fe-1/websockets", [("t2", 3)]),
        ("fe-1/uploads", [("t1", 1)]),
    ]
    assert all("pots" not in row for _, row in lists["frontends"])
    of_tenant = (await reader.content(ViewKey("t7", "t7", is_operator=False))).lists
    assert "pots" not in of_tenant
    assert "frontends" not in of_tenant


async def test_a_failed_job_tells_of_its_dead_letter() -> None:
    fakes = Fakes()
    reader, key = reader_of(fakes), ViewKey(None, "default", job_id="0-x")
    assert (await reader.content(key)).objects["dead_letter"] is None
    fakes.letter = DeadLetter("0-x", "m", "default", "chat", "poison", 4, 0, 1)
    assert (await reader.content(key)).objects["dead_letter"] == {"requeued_as": None}
    fakes.letter = Requeued("default", "0-y")
    assert (await reader.content(key)).objects["dead_letter"] == {"requeued_as": "0-y"}
    fakes.state = JobState.FINISHED
    assert (await reader.content(key)).objects["dead_letter"] is None
    fakes.reads.clear()
    assert (await reader.content(key)).lists == {}
    assert fakes.reads == ["get"]
