"""Decides whether a job's history is linearizable.

A history is linearizable when each operation can be given one instant between its call and its
reply so that, in the order of these instants, every reply is what `transitions` says (Herlihy and
Wing, 1990). Jobs do not share state, so each job is checked alone, which keeps the search small:
depth first over the operations that may be next, with the reached (operations done, state) pairs
remembered (Wing and Gong, 1993; Lowe, 2017).

What the store does by itself is not recorded. It is allowed where the rest of the history asks for
it: a running job goes back to the queue when its worker died (a later claim has a higher attempt),
a claim whose reply was lost leaves a gap in the attempts, and a deadline, a reader that left or a
crash limit ends a job. It never finishes one: `finished` comes from an append alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shared.messages import JobState
from tests.support.job_history import (
    APPEND,
    CANCEL,
    CLAIM,
    END,
    GET,
    RELEASE,
    SUBMIT,
    Operation,
)

ABSENT, QUEUED, RUNNING = "absent", JobState.QUEUED.value, JobState.RUNNING.value
FINISHED, CANCELLED = JobState.FINISHED.value, JobState.CANCELLED.value
ENDED_BY_THE_STORE = frozenset({CANCELLED, JobState.EXPIRED.value, JobState.FAILED.value})
TERMINAL = ENDED_BY_THE_STORE | {FINISHED}
REFUSALS = frozenset({"ended", "fenced"})  # of an append
MAX_STATES = 2_000_000


class State(NamedTuple):
    """One job, as every client must see it."""

    phase: str = ABSENT
    attempt: int = 0
    num_tokens: int = 0


class NotLinearizable(AssertionError):
    """No order of the operations explains their replies."""


def check_history(job_id: str, history: Sequence[Operation]) -> None:
    """Raises NotLinearizable, with the history as far as it could be explained."""
    operations = sorted([*history, *_sent_first(history)], key=lambda o: o.invoked_s)
    if all(operation.kind != SUBMIT for operation in operations):  # its client recorded nothing
        long_ago = operations[0].invoked_s - 1.0
        operations.insert(0, Operation(job_id, SUBMIT, "unknown", long_ago, None, {}))
    returns = [
        float("inf") if operation.returned_s is None else operation.returned_s
        for operation in operations
    ]
    by_store = _ends_by_the_store(operations)
    max_attempt = max((o.values["attempt"] for o in operations if o.kind == CLAIM), default=0)
    required = sum(1 << i for i, o in enumerate(operations) if o.returned_s is not None)
    start = (0, State())
    pending, seen = [start], {start}
    furthest, best = 0, 0
    while pending:
        done, state = pending.pop()
        if done & required == required:
            return
        if done.bit_count() > best:
            best, furthest = done.bit_count(), done
        earliest_return = min(
            (returns[i] for i in range(len(operations)) if not done >> i & 1), default=0.0
        )
        following = [(done, moved) for moved in _by_the_store(state, by_store, max_attempt)]
        for i, operation in enumerate(operations):
            if operation.invoked_s > earliest_return:
                break
            if not done >> i & 1:
                following += [(done | 1 << i, after) for after in transitions(state, operation)]
        for step in following:
            if step not in seen:
                seen.add(step)
                pending.append(step)
        if len(seen) > MAX_STATES:
            raise AssertionError(f"{job_id}: the search took over {MAX_STATES} states")
    lines = [
        f"{'  ' if furthest >> i & 1 else '->'} {operation}"
        for i, operation in enumerate(operations)
    ]
    raise NotLinearizable(
        f"{job_id}: no order explains the operations marked ->\n" + "\n".join(lines)
    )


def _sent_first(history: Sequence[Operation]) -> Iterator[Operation]:
    """Yields what a refused append may have been before.

    A call whose reply is lost is sent again by the connection pool: it may have had its effect, and
    the refusal is the reply to the second sending.
    """
    for operation in history:
        if operation.kind == APPEND and operation.values.get("status") in REFUSALS:
            values = {k: v for k, v in operation.values.items() if k != "status"}
            yield dataclasses.replace(operation, returned_s=None, values=values)


def transitions(state: State, operation: Operation) -> Iterator[State]:
    """Yields the states that a job may have after `operation` gave its reply; none: it cannot.

    An operation without a reply may have had its effect; that it had none is covered by leaving
    it out of the order.
    """
    phase, attempt, num_tokens = state
    values, is_known = operation.values, operation.returned_s is not None
    if operation.kind == SUBMIT:
        status = values.get("status")
        if phase == ABSENT and status in (None, "accepted"):
            yield State(QUEUED)
        elif phase != ABSENT and status in (None, "accepted", "duplicate"):
            yield state  # sent again under one id or key
        elif status == "refused":
            yield state
    elif operation.kind == CLAIM:
        is_next = values["attempt"] > attempt and values["num_tokens"] == num_tokens
        if phase in (QUEUED, RUNNING) and is_next:
            yield State(RUNNING, values["attempt"], num_tokens)
    elif operation.kind == APPEND:
        yield from _appended(state, operation, is_known=is_known)
    elif operation.kind == RELEASE:
        is_owner = phase == RUNNING and attempt == values["attempt"]
        if is_owner and values.get("status") in (None, "released"):
            yield State(QUEUED, attempt, num_tokens)
        elif not is_owner and values.get("status") == "not_owned":
            yield state
    elif operation.kind == CANCEL:
        status = values.get("status")
        if phase in (QUEUED, RUNNING) and status in (None, "won"):
            yield State(CANCELLED, attempt, num_tokens)
        is_late = phase in TERMINAL and status == "lost" and values["state"] == phase
        if is_late or (phase == ABSENT and status == "unknown_job"):
            yield state
    elif operation.kind in (GET, END):
        seen = values.get("state")
        is_seen = seen == phase and values.get("num_tokens") == num_tokens
        if not is_known or is_seen or (seen is None and phase == ABSENT):
            yield state
    else:
        raise ValueError(f"unknown kind of operation: {operation.kind}")


def _appended(state: State, operation: Operation, *, is_known: bool) -> Iterator[State]:
    phase, attempt, num_tokens = state
    values = operation.values
    status = values.get("status")
    is_owner = phase == RUNNING and attempt == values["attempt"]
    if is_owner and status in (None, "ok"):
        if values["start"] == num_tokens:
            yield State(values["end_state"] or RUNNING, attempt, values["end"])
        elif values["end"] <= num_tokens and values["end_state"] is None:
            yield state  # sent again after a lost reply
    is_same_end = state == (values["end_state"], values["attempt"], values["end"])
    if is_same_end and status in (None, "ok"):
        yield state  # the end of the job sent again after a lost reply
    if is_known and status != "ok":
        explained = {
            "ended": phase in TERMINAL,
            "fenced": (phase in (QUEUED, RUNNING) and not is_owner)
            or (phase in TERMINAL and attempt > values["attempt"]),
            "gone": phase == ABSENT,
        }
        if explained.get(str(status), True):
            yield state


def _ends_by_the_store(operations: Sequence[Operation]) -> frozenset[str]:
    """Returns the states in which the store may have ended the job by itself.

    They are the ones that a client saw; any, where only its worker learned that it had ended.
    """
    seen = frozenset(
        operation.values["state"]
        for operation in operations
        if operation.kind in (GET, END, CANCEL) and operation.values.get("state") in TERMINAL
    )
    was_told = any(o.kind == APPEND and o.values.get("status") == "ended" for o in operations)
    return seen & ENDED_BY_THE_STORE if seen or not was_told else ENDED_BY_THE_STORE


def _by_the_store(state: State, ends: frozenset[str], max_attempt: int) -> Iterator[State]:
    phase, attempt, num_tokens = state
    if phase not in (QUEUED, RUNNING):
        return
    for end in ends:
        yield State(end, attempt, num_tokens)
    if phase == RUNNING and attempt < max_attempt:
        yield State(QUEUED, attempt, num_tokens)
    if phase == QUEUED and attempt + 1 < max_attempt:
        yield State(RUNNING, attempt + 1, num_tokens)
