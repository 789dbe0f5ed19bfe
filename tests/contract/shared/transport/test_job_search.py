"""Jobs are found by what they have, a page at a time, within bounds."""

from __future__ import annotations

import pytest

from shared.messages import JobState
from shared.transport.ports.job_search import JobCursor, JobFilter, JobPage
from tests.support.jobs import MODEL
from tests.support.transport_steps import Steps


async def many(steps: Steps) -> dict[str, list[str]]:
    """Live and ended jobs of two tenants and two models, by what they are."""
    await steps.worker("w1", (MODEL, "other"))
    ids: dict[str, list[str]] = {"a": [], "b": [], "other": [], "cancelled": [], "timed out": []}
    for number in range(6):
        tenant, model = "ab"[number % 2], (MODEL, "other")[number // 4]
        job = await steps.submit(tenant=tenant, model=model)
        ids[tenant].append(job.job_id)
        ids["other"] += [job.job_id] * (model == "other")
    for number in range(6):
        job = await steps.submit(tenant="ab"[number % 2])
        ids["ab"[number % 2]].append(job.job_id)
        reason = "disconnected" if number < 2 else "cancelled"
        await steps.store.cancel(job.job_id, reason)
        ids["cancelled" if number >= 2 else "timed out"].append(job.job_id)
    return ids


def ids_of(page: JobPage) -> list[str]:
    return [record.job_id for record in page.records]


@pytest.mark.parametrize("limit", [1, 2, 5, 50])
async def test_pages_follow_one_another_without_gap_or_repeat(steps: Steps, limit: int) -> None:
    ids = await many(steps)
    whole = ids_of(await steps.search.find(JobFilter(), 50))
    assert sorted(whole) == sorted(ids["a"] + ids["b"])
    for wanted in (JobFilter(), JobFilter(tenant="a"), JobFilter(model=MODEL)):
        expected = ids_of(await steps.search.find(wanted, 50))
        found: list[str] = []
        after, num_pages = None, 0
        while num_pages == 0 or after is not None:
            page = await steps.search.find(wanted, limit, after)
            assert len(page.records) <= limit
            assert page.after is None or JobCursor.parse(str(page.after)) == page.after
            found += ids_of(page)
            after, num_pages = page.after, num_pages + 1
        assert found == expected
        assert num_pages == -(-len(expected) // limit), "the last page says that it is the last"


async def test_each_filter_and_all_together(steps: Steps) -> None:
    ids = await many(steps)

    async def found(**wanted: object) -> set[str]:
        return set(ids_of(await steps.search.find(JobFilter(**wanted), 50)))  # type: ignore[arg-type]

    ended = {*ids["cancelled"], *ids["timed out"]}
    assert await found(tenant="a") == set(ids["a"])
    assert await found(model="other") == set(ids["other"])
    assert await found(model="other", state=JobState.QUEUED) == set(ids["other"])
    assert await found(state=JobState.CANCELLED) == ended
    assert await found(reason="disconnected") == set(ids["timed out"])
    assert await found(reason="disconnected", tenant="b") == set(ids["timed out"]) & set(ids["b"])
    assert await found(state=JobState.RUNNING) == set()
    one = ids["a"][0]
    assert await found(id_part=one) == {one}
    assert await found(id_part=one[-12:]) == {one}
    assert await found(id_part=one, tenant="b") == set(), "of another tenant"
    assert one in await found(id_part=one[:14])


async def test_a_search_says_how_far_it_went_and_goes_on_from_there(steps: Steps) -> None:
    await steps.worker("w1")
    oldest = await steps.submit(tenant="rare")
    for _ in range(30):
        await steps.submit(tenant="many")
    wanted = JobFilter(id_part=oldest.job_id[-12:])
    page = await steps.search.find(wanted, 10, max_searched=8)
    assert (page.records, page.num_searched) == ([], 8)
    num_pages = 1
    while not page.records:
        assert page.after is not None
        page = await steps.search.find(wanted, 10, page.after, max_searched=8)
        num_pages += 1
    assert ids_of(page) == [oldest.job_id]
    assert num_pages == 4


async def test_more_jobs_of_one_deadline_than_a_page_holds_are_all_listed(steps: Steps) -> None:
    await steps.worker("w1")
    ids = {(await steps.submit()).job_id for _ in range(9)}
    await steps.redis.zadd(steps.keys.listed("queued"), dict.fromkeys(ids, 10**13))
    found: list[str] = []
    after = None
    for _ in range(9):
        page = await steps.search.find(JobFilter(), 1, after)
        found += ids_of(page)
        after = page.after
    assert (set(found), len(found), after) == (ids, 9, None)


@pytest.mark.parametrize(
    "text", ["", "live", "live.1", "live.x.0-a", "new.1.0-a", "live.1.a", "live.-1.0-a"]
)
def test_only_a_cursor_is_read_as_one(text: str) -> None:
    with pytest.raises(ValueError, match="cursor"):
        JobCursor.parse(text)
