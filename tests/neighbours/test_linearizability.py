"""The checker of histories: it accepts what one job can explain and refuses seeded faults."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.job_history import (
    APPEND,
    CANCEL,
    CLAIM,
    END,
    GET,
    RELEASE,
    SUBMIT,
    HistoryWriter,
    Operation,
    read_histories,
)
from tests.support.linearizability import NotLinearizable, State, check_history, transitions
from tests.support.table import table

JOB = "0-job"
OK_APPEND = {"attempt": 1, "start": 0, "end": 4, "end_state": None, "status": "ok"}
LAST_APPEND = {"attempt": 1, "start": 4, "end": 5, "end_state": "finished", "status": "ok"}


def history(*steps: tuple[str, dict[str, Any]]) -> list[Operation]:
    """One operation after the other, none overlapping."""
    return [
        Operation(JOB, kind, "client", 10.0 * i, 10.0 * i + 5.0, values)
        for i, (kind, values) in enumerate(steps)
    ]


SUBMITTED = (SUBMIT, {"status": "accepted"})
CLAIMED = (CLAIM, {"attempt": 1, "num_tokens": 0})
WHOLE = (SUBMITTED, CLAIMED, (APPEND, OK_APPEND), (APPEND, LAST_APPEND))


def seen(state: str | None, num_tokens: int = 0, kind: str = GET) -> tuple[str, dict[str, Any]]:
    return kind, {"state": state, "num_tokens": num_tokens}


@pytest.mark.parametrize(
    "steps",
    [
        (*WHOLE, seen("finished", 5), seen("finished", 5, END)),
        (SUBMITTED, (SUBMIT, {"status": "duplicate"}), seen("queued")),
        (seen(None), SUBMITTED, CLAIMED, seen("running")),
        (*WHOLE, (CANCEL, {"status": "lost", "state": "finished"})),
        (SUBMITTED, CLAIMED, (CANCEL, {"status": "won", "state": "cancelled"}), seen("cancelled")),
        (SUBMITTED, CLAIMED, (RELEASE, {"attempt": 1, "status": "released"}), seen("queued")),
        # A worker died: the job is queued again, and its next worker goes on from the log.
        (
            SUBMITTED,
            CLAIMED,
            (APPEND, OK_APPEND),
            seen("queued", 4),
            (CLAIM, {"attempt": 2, "num_tokens": 4}),
            (APPEND, OK_APPEND | {"start": 4, "end": 5, "status": "fenced"}),
            (APPEND, LAST_APPEND | {"attempt": 2}),
            seen("finished", 5, END),
            (APPEND, OK_APPEND | {"start": 4, "end": 5, "status": "fenced"}),
        ),
        # The same, and the worker was cut off behind an append that had its effect.
        (
            SUBMITTED,
            CLAIMED,
            (APPEND, OK_APPEND | {"status": "fenced"}),
            (CLAIM, {"attempt": 2, "num_tokens": 4}),
            (APPEND, LAST_APPEND | {"attempt": 2}),
        ),
        # Its deadline ended it, which no client recorded.
        (SUBMITTED, CLAIMED, (APPEND, OK_APPEND), seen("expired", 4, END), seen("expired", 4)),
        # The reply to an append was lost, and it is sent again.
        (SUBMITTED, CLAIMED, (APPEND, OK_APPEND), (APPEND, OK_APPEND), (APPEND, LAST_APPEND)),
    ],
)
def test_what_one_job_explains_is_accepted(steps: tuple[Any, ...]) -> None:
    check_history(JOB, history(*steps))


@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        ("a read of the past", (*WHOLE, seen("finished", 5, END), seen("running", 4))),
        ("two ends", (*WHOLE, seen("finished", 5, END), seen("cancelled", 5, END))),
        ("a lost token", (*WHOLE, seen("finished", 4, END))),
        ("a finish without an append", (SUBMITTED, CLAIMED, seen("finished", 0, END))),
        ("a cancel won after the end", (*WHOLE, (CANCEL, {"status": "won", "state": "cancelled"}))),
        ("a cancel that had no effect", (
            SUBMITTED, CLAIMED, (CANCEL, {"status": "won", "state": "cancelled"}), seen("running"),
        )),
        ("an accepted job that vanished", (SUBMITTED, seen(None))),
        ("two claims of one attempt", (SUBMITTED, CLAIMED, CLAIMED)),
        ("a claim behind the log", (
            SUBMITTED, CLAIMED, (APPEND, OK_APPEND), (CLAIM, {"attempt": 2, "num_tokens": 0}),
        )),
        ("an older attempt that writes", (
            SUBMITTED, CLAIMED, (CLAIM, {"attempt": 2, "num_tokens": 0}), (APPEND, OK_APPEND),
        )),
        ("a hole between appends", (SUBMITTED, CLAIMED, (APPEND, OK_APPEND | {"start": 1}))),
        ("an append refused without a reason", (
            SUBMITTED, CLAIMED, (APPEND, OK_APPEND | {"status": "fenced"}),
        )),
        ("an end that fences its own attempt", (
            *WHOLE, (APPEND, OK_APPEND | {"status": "fenced"}),
        )),
        ("a queued job without a dead worker", (SUBMITTED, CLAIMED, seen("queued"))),
    ],
)  # fmt: skip
def test_a_seeded_fault_is_found(fault: str, steps: tuple[Any, ...]) -> None:
    with pytest.raises(NotLinearizable):
        check_history(JOB, history(*steps))


def random_history(rng: random.Random) -> list[Operation]:
    """Overlapping operations whose effects come in one order: linearizable by construction."""
    state, at_s = State(), 0.0
    operations: list[Operation] = []

    def call(kind: str, client: str, values: dict[str, Any], reply: dict[str, Any]) -> None:
        nonlocal state, at_s
        at_s += rng.random()
        early, late = at_s - rng.random() * 2, at_s + rng.random() * 2
        operation = Operation(JOB, kind, client, early, late, values | reply)
        (state,) = set(transitions(state, operation))
        lost = rng.random() < 0.1 and kind in (APPEND, SUBMIT)
        operations.append(
            dataclasses.replace(operation, returned_s=None, values=values) if lost else operation
        )

    call(SUBMIT, "a", {}, {"status": "accepted"})
    while len(operations) < 40 and state.phase in ("queued", "running"):
        what = rng.random()
        if what < 0.25:
            call(GET, "b", {}, {"state": state.phase, "num_tokens": state.num_tokens})
        elif state.phase == "queued" or what < 0.3:
            values = {"attempt": state.attempt + 1, "num_tokens": state.num_tokens}
            call(CLAIM, "w", values, {})
        elif what < 0.33:
            call(CANCEL, "b", {}, {"status": "won", "state": "cancelled"})
        else:
            end_state = "finished" if rng.random() < 0.05 else None
            place = {"attempt": state.attempt, "start": state.num_tokens}
            values = place | {"end": state.num_tokens + rng.randint(1, 3), "end_state": end_state}
            call(APPEND, "w", values, {"status": "ok"})
    if state.phase in ("queued", "running"):
        return operations
    for kind in (END, GET):
        call(kind, "b", {}, {"state": state.phase, "num_tokens": state.num_tokens})
    return operations


@table("seed", range(40))
def test_overlapping_operations_are_accepted_and_the_same_with_a_wrong_reply_is_not(
    seed: int,
) -> None:
    operations = random_history(random.Random(seed))
    check_history(JOB, operations)
    result = [o for o in operations if o.kind in (GET, END) and o.returned_s is not None]
    if not result:
        return
    wrong = result[-1]
    impossible = wrong.values | {"num_tokens": wrong.values["num_tokens"] + 1000}
    broken = [o if o is not wrong else dataclasses.replace(o, values=impossible) for o in result]
    rest = [o for o in operations if o not in result]
    with pytest.raises(NotLinearizable):
        check_history(JOB, rest + broken)


def test_histories_are_read_back_with_calls_that_a_kill_left_without_a_reply(
    tmp_path: Path,
) -> None:
    writer = HistoryWriter(tmp_path, "one")
    number = writer.invoke(JOB, APPEND, attempt=1, start=0, end=1, end_state=None)
    writer.reply(number, status="ok")
    writer.invoke(JOB, APPEND, attempt=1, start=1, end=2, end_state=None)
    writer.close()
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write('{"what": "reply", "num')
    whole, cut = read_histories(tmp_path)[JOB]
    assert whole.values["status"] == "ok"
    assert whole.returned_s is not None
    assert whole.returned_s >= whole.invoked_s
    assert cut.returned_s is None
    assert cut.client == "one"


def test_an_operation_without_a_reply_explains_both_outcomes() -> None:
    """A cancel whose reply was lost may have ended the job or not."""
    lost = Operation(JOB, CANCEL, "client", 25.0, None, {})
    outcomes: list[Callable[[], None]] = [
        lambda: check_history(JOB, [*history(*WHOLE, seen("finished", 5)), lost]),
        lambda: check_history(JOB, [*history(SUBMITTED, CLAIMED, seen("cancelled")), lost]),
    ]
    for check in outcomes:
        check()
