"""The last hour: what is read, kept and told."""

from __future__ import annotations

from api.deployment import history
from api.deployment.history import Histories, ttft_quantile
from shared.transport.ports.deployment import (
    DAY_SLOT_S,
    DAY_SLOTS,
    HISTORY_SLOTS,
    History,
    HistorySlot,
)


class FakeDeployment:
    def __init__(self) -> None:
        self.slots: dict[int, HistorySlot] = {}
        self.day: dict[int, HistorySlot] = {}
        self.now_s = 0.0
        self.read: list[int] = []

    async def history(self, num_slots: int, slot_s: int) -> History:
        self.read.append(num_slots)
        kept = self.day if slot_s == DAY_SLOT_S else self.slots
        last = int(self.now_s // slot_s)
        numbers = range(last - num_slots + 1, last + 1)
        return History(self.now_s, [kept.get(n, HistorySlot(n)) for n in numbers])


def histories_of(deployment: FakeDeployment) -> Histories:
    return Histories(deployment)  # type: ignore[arg-type]


async def test_requests_a_second_are_the_difference_of_the_totals() -> None:
    deployment = FakeDeployment()
    deployment.slots = {
        1000: HistorySlot(1000, 1, 1, accepted=50, ended=1),
        1001: HistorySlot(1001, 1, 1, accepted=110, ended=1),
        1002: HistorySlot(1002, 1, 1, accepted=3, ended=1),  # the totals were lost
        1004: HistorySlot(1004, 1, 1, accepted=93, ended=1),  # after one that nobody saw
    }
    deployment.now_s = 1004 * 30 + 15
    rows = dict(await histories_of(deployment).hour())
    rates = {number: rows[number]["requests_per_s"] for number in ("1000", "1001", "1002", "1004")}
    assert rates == {"1000": None, "1001": 2.0, "1002": 0, "1004": 2.0}
    assert rows["1003"]["requests_per_s"] is None
    assert rows["1003"]["queued"] is None
    assert rows["1004"]["at"] == 1004 * 30


async def test_an_hour_is_kept_and_what_is_over_is_read_once() -> None:
    deployment = FakeDeployment()
    deployment.now_s = 5000 * 30.0
    histories = histories_of(deployment)
    first = await histories.hour()
    assert len(first) == HISTORY_SLOTS
    deployment.slots[5001] = HistorySlot(5001, queued=4)
    deployment.now_s += 31
    rows = await histories.hour()
    assert len(rows) == HISTORY_SLOTS
    assert rows[-1][1]["queued"] == 4
    assert rows[0][0] == str(5001 - HISTORY_SLOTS + 1)
    assert deployment.read[0] == HISTORY_SLOTS
    assert deployment.read[1] <= 3
    ring = histories._hour
    ring._read_s = (ring._read_s or 0) - 10_000  # nobody looked for hours
    await histories.hour()
    assert deployment.read[2] == HISTORY_SLOTS


async def test_a_slot_tells_rates_failures_and_what_was_in_use() -> None:
    deployment = FakeDeployment()
    known = {"queue_age_s": 4, "kv_permille": 250, "store_used": 9, "store_limit": 10}
    counts = {"tokens_in": 60, "tokens_out": 300, "unavailable": 2}
    deployment.slots = {
        1000: HistorySlot(1000, 1, 1, 50, 1, failed=1, expired=7),
        1001: HistorySlot(1001, 1, 1, 60, 1, failed=4, expired=7, **known, **counts),
        1003: HistorySlot(1003, 1, 1, 60, 1, failed=0, expired=9),  # by a release without counts
    }
    deployment.now_s = 1003 * 30 + 15
    rows = dict(await histories_of(deployment).hour())
    row = rows["1001"]
    assert (row["tokens_in_per_s"], row["tokens_out_per_s"], row["kv"]) == (2.0, 10.0, 0.25)
    assert (row["failed"], row["expired"], row["unavailable"], row["errors"]) == (3, 0, 2, 0)
    assert (row["queue_age_s"], row["store_used"], row["store_limit"]) == (4, 9, 10)
    assert {value for name, value in rows["1002"].items() if name != "at"} == {None}  # a gap
    assert (rows["1003"]["failed"], rows["1003"]["expired"]) == (0, 2)
    assert (rows["1003"]["tokens_out_per_s"], rows["1003"]["kv"]) == (0.0, None)


async def test_the_day_ends_with_what_is_not_folded_yet() -> None:
    deployment = FakeDeployment()
    deployment.day = {7: HistorySlot(7, 9, 1, 100, 90, {8: 2})}
    deployment.slots = {
        8 * 20 + 1: HistorySlot(161, 5, 1, 130, 90, {8: 1}, tokens_out=60),
        8 * 20 + 2: HistorySlot(162, 3, 2, 160, 95, {8: 1, 9: 1}, tokens_out=60),
    }
    deployment.now_s = 8 * 600 + 60.0
    rows = dict(await histories_of(deployment).day())
    assert len(rows) == DAY_SLOTS
    assert [rows["7"]["at"], rows["8"]["at"]] == [4200, 4800]
    assert (rows["7"]["queued"], rows["8"]["queued"], rows["8"]["running"]) == (9, 5, 2)
    assert (rows["8"]["requests_per_s"], rows["8"]["tokens_out_per_s"]) == (1.0, 2.0)
    assert rows["6"]["queued"] is None


def test_quantiles_are_within_a_bucket() -> None:
    assert ttft_quantile({}, 0.5) is None
    buckets = {history.TTFT_PER_OCTAVE * 3: 95, history.TTFT_PER_OCTAVE * 10: 5}
    assert abs((ttft_quantile(buckets, 0.5) or 0) - 8) <= 0.05 * 8 + 0.5
    assert abs((ttft_quantile(buckets, 0.95) or 0) - 8) <= 0.05 * 8 + 0.5
    assert abs((ttft_quantile(buckets, 0.96) or 0) - 1024) <= 0.05 * 1024
