"""The last hour: what is read, kept and told."""

from __future__ import annotations

from api.deployment import history
from api.deployment.history import HistoryRing, ttft_quantile
from shared.transport.ports.deployment import HISTORY_SLOTS, History, HistorySlot


class FakeDeployment:
    def __init__(self) -> None:
        self.slots: dict[int, HistorySlot] = {}
        self.now_s = 0.0
        self.read: list[int] = []

    async def history(self, num_slots: int) -> History:
        self.read.append(num_slots)
        last = int(self.now_s // 30)
        numbers = range(last - num_slots + 1, last + 1)
        return History(self.now_s, [self.slots.get(n, HistorySlot(n)) for n in numbers])


def ring_of(deployment: FakeDeployment) -> HistoryRing:
    return HistoryRing(deployment)  # type: ignore[arg-type]


async def test_requests_a_second_are_the_difference_of_the_totals() -> None:
    deployment = FakeDeployment()
    deployment.slots = {
        1000: HistorySlot(1000, 1, 1, accepted=50, ended=1),
        1001: HistorySlot(1001, 1, 1, accepted=110, ended=1),
        1002: HistorySlot(1002, 1, 1, accepted=3, ended=1),  # the totals were lost
        1004: HistorySlot(1004, 1, 1, accepted=93, ended=1),  # after one that nobody saw
    }
    deployment.now_s = 1004 * 30 + 15
    rows = dict(await ring_of(deployment).rows())
    rates = {number: rows[number]["requests_per_s"] for number in ("1000", "1001", "1002", "1004")}
    assert rates == {"1000": None, "1001": 2.0, "1002": 0, "1004": 2.0}
    assert rows["1003"]["requests_per_s"] is None
    assert rows["1003"]["queued"] is None
    assert rows["1004"]["at"] == 1004 * 30


async def test_an_hour_is_kept_and_what_is_over_is_read_once() -> None:
    deployment = FakeDeployment()
    deployment.now_s = 5000 * 30.0
    ring = ring_of(deployment)
    first = await ring.rows()
    assert len(first) == HISTORY_SLOTS
    deployment.slots[5001] = HistorySlot(5001, queued=4)
    deployment.now_s += 31
    rows = await ring.rows()
    assert len(rows) == HISTORY_SLOTS
    assert rows[-1][1]["queued"] == 4
    assert rows[0][0] == str(5001 - HISTORY_SLOTS + 1)
    assert deployment.read[0] == HISTORY_SLOTS
    assert deployment.read[1] <= 3
    ring._read_s = (ring._read_s or 0) - 10_000  # nobody looked for hours
    await ring.rows()
    assert deployment.read[2] == HISTORY_SLOTS


def test_quantiles_are_within_a_bucket() -> None:
    assert ttft_quantile({}, 0.5) is None
    buckets = {history.TTFT_PER_OCTAVE * 3: 95, history.TTFT_PER_OCTAVE * 10: 5}
    assert abs((ttft_quantile(buckets, 0.5) or 0) - 8) <= 0.05 * 8 + 0.5
    assert abs((ttft_quantile(buckets, 0.95) or 0) - 8) <= 0.05 * 8 + 0.5
    assert abs((ttft_quantile(buckets, 0.96) or 0) - 1024) <= 0.05 * 1024
