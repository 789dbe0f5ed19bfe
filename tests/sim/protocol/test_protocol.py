"""The job protocol, in every order of steps and faults; and each seeded bug, which must be found.

`pytest -s` shows the number of states and the shortest way to every bug. `make chaos` searches the
largest of them too. PENSTOCK_MODEL_FAULTS=N allows N faults in the runs without a seeded bug (4
without a rollback: minutes).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest

from tests.sim.protocol.bugs import Bug
from tests.sim.protocol.protocol import Protocol
from tests.sim.protocol.search import check

MORE_FAULTS = os.environ.get("PENSTOCK_MODEL_FAULTS")
LONG = pytest.mark.long
MAX_TRACE = 12  # steps; every seeded bug has a shorter way

CHANGED = "something changed after the end"
ELSEWHERE = "the job runs with a worker, and another one's death would end its attempt"
FOREIGN = "a worker with other files runs the job"
DROPPED = "a job that the server has lost was dropped by who holds it"
MIXED = "the log mixes two histories, or holds tokens twice"
SPLICED = "the reader's text is a splice"
STUCK = "from here neither the job nor its reader comes to an end by itself"
UNFENCED = "another attempt than the latest spoke"
UNLOGGED = "the reader holds what is not in the log"
WRONG_END = "the reader was told of an end that is not its text's"


class Seeded(NamedTuple):
    fault: str
    num_faults: int = 2
    rollback: bool = False
    replaced: bool = False
    lanes: bool = False


SEEDED = {
    Bug.APPEND_WITHOUT_FENCE: Seeded(UNFENCED),
    Bug.APPEND_AFTER_THE_END: Seeded(CHANGED),
    Bug.APPEND_IS_NOT_IDEMPOTENT: Seeded(MIXED),
    Bug.APPEND_WITHOUT_CHAIN: Seeded(MIXED, rollback=True),
    Bug.END_AFTER_THE_END: Seeded(CHANGED),
    Bug.CLAIM_KEEPS_THE_ATTEMPT: Seeded(UNFENCED, num_faults=3),
    Bug.RELEASE_WITHOUT_FENCE: Seeded(UNFENCED),
    Bug.RECOVER_BURIES_THE_PENDING: Seeded(ELSEWHERE),
    Bug.RESTORE_WITHOUT_FENCE: Seeded(UNFENCED),
    Bug.RESTORE_WITHOUT_TOMBSTONE: Seeded(CHANGED),
    Bug.CLAIM_OF_OTHER_FILES: Seeded(FOREIGN, replaced=True),
    Bug.NO_END_WITHOUT_FILES: Seeded(STUCK, replaced=True),
    Bug.CLAIM_OF_A_SEEN_ENTRY: Seeded(ELSEWHERE),
    Bug.LEFT_TO_A_WORKER_FOR_GOOD: Seeded(STUCK, num_faults=1, lanes=True),
    Bug.PREEMPTS_WITHOUT_GIVING_BACK: Seeded(STUCK, num_faults=0, lanes=True),
    Bug.DROPS_WHAT_IS_DELIVERED_AGAIN: Seeded(ELSEWHERE),
    Bug.PUBLISH_BEFORE_LOG: Seeded(UNLOGGED),
    Bug.NO_RESTORE: Seeded(DROPPED, num_faults=1, rollback=True),
    Bug.NO_RECONCILE: Seeded(STUCK),
    Bug.NO_REWIND: Seeded(STUCK, num_faults=1, rollback=True),
    Bug.NO_GAP_CHECK: Seeded(SPLICED),
    Bug.END_BEFORE_TEXT: Seeded(WRONG_END),
    Bug.NO_IDLE_LOOK: Seeded(STUCK),
    Bug.LOOKS_AT_LENGTHS: Seeded(STUCK),
    Bug.NO_DIVERGENCE_CHECK: Seeded(SPLICED, rollback=True),
    Bug.COMPARES_ONLY_OVERLAPS: Seeded(WRONG_END, rollback=True),
}


@pytest.mark.timeout(0 if MORE_FAULTS else 600)
@pytest.mark.parametrize(
    ("rules", "min_states"),
    [
        pytest.param({"num_faults": 2}, 45_000, id="two-faults"),
        pytest.param({"num_faults": 1, "rollback": True}, 13_000, id="rollback"),
        pytest.param({"num_faults": 2, "replaced": True}, 16_000, id="replaced"),
        pytest.param({"num_faults": 1, "lanes": True}, 10_000, id="lanes"),
        pytest.param({"num_faults": 2, "lanes": True}, 150_000, id="lanes-2", marks=LONG),
        pytest.param({"num_faults": 3}, 270_000, id="three-faults", marks=LONG),
        pytest.param({"num_faults": 2, "num_tokens": 3}, 190_000, id="three-tokens", marks=LONG),
        pytest.param(
            {"num_faults": 2, "rollback": True}, 300_000, id="rollback-and-fault", marks=LONG
        ),
    ],
)
def test_no_order_of_steps_and_faults_breaks_an_invariant(
    rules: dict[str, Any], min_states: int
) -> None:
    if MORE_FAULTS:
        rules = rules | {"num_faults": int(MORE_FAULTS)}
    result = check(Protocol(**rules))
    print(f"\n{rules}: {result}")
    assert result.fault is None, str(result)
    assert MORE_FAULTS or result.num_states >= min_states, "the model no longer reaches as much"


@pytest.mark.parametrize("bug", list(Bug), ids=lambda bug: bug.name.lower())
def test_a_seeded_bug_is_found(bug: Bug) -> None:
    seeded = SEEDED[bug]
    rules = Protocol(
        num_faults=seeded.num_faults,
        rollback=seeded.rollback,
        replaced=seeded.replaced,
        lanes=seeded.lanes,
        bug=bug,
    )
    result = check(rules)
    print(f"\n{bug}: {result}")
    assert result.fault == seeded.fault, str(result)
    assert 0 < len(result.trace) <= MAX_TRACE


def test_without_faults_the_job_needs_no_recovery() -> None:
    """The shortest run of all: no lost reply, no lease, no second worker is ever used."""
    result = check(Protocol(num_faults=0))
    assert result.fault is None, str(result)
