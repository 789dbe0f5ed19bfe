"""Seeded bugs: what each transition must not do, one at a time."""

from __future__ import annotations

from enum import StrEnum


class Bug(StrEnum):
    # at the server
    APPEND_WITHOUT_FENCE = "append asks neither for the owner nor for the attempt"
    APPEND_AFTER_THE_END = "append does not ask whether the job has ended"
    APPEND_IS_NOT_IDEMPOTENT = "append logs whatever comes, also when it comes again"
    APPEND_WITHOUT_CHAIN = "append compares lengths, not contents"
    END_AFTER_THE_END = "finish does not ask whether the job has ended"
    CLAIM_KEEPS_THE_ATTEMPT = "a job that is taken over keeps its attempt"
    RELEASE_WITHOUT_FENCE = "release asks neither for the owner nor for the attempt"
    RECOVER_BURIES_THE_PENDING = "a dead worker's consumer is removed with its pending entries"
    RESTORE_WITHOUT_FENCE = "a job is put back although a later attempt has it"
    RESTORE_WITHOUT_TOMBSTONE = "a job is put back that has ended and whose record was removed"
    CLAIM_OF_OTHER_FILES = "a claim does not compare the job's files with its worker's"
    NO_END_WITHOUT_FILES = "a job that was set aside waits although no worker has its files"
    CLAIM_OF_A_SEEN_ENTRY = "a claim does not ask whether its worker still holds the entry"
    LEFT_TO_A_WORKER_FOR_GOOD = "a job waits for the worker with its prefix however long"
    PREEMPTS_WITHOUT_GIVING_BACK = "a job that gives way is left to no consumer"
    DROPS_WHAT_IS_DELIVERED_AGAIN = "a running job that was claimed ahead loses its entry"
    # at a worker
    NO_RESTORE = "a worker drops a job that the server has lost"
    PUBLISH_BEFORE_LOG = "a worker publishes its tokens and then logs them"
    NO_RECONCILE = "a worker never looks for deliveries whose reply was lost"
    NO_REWIND = "a worker that is told of a gap sends the same again"
    # at a reader
    NO_GAP_CHECK = "a reader takes every frame as the next"
    END_BEFORE_TEXT = "a reader takes an end frame although text before it is missing"
    NO_IDLE_LOOK = "a reader to whom nothing comes does not look at its job"
    LOOKS_AT_LENGTHS = "a look compares lengths and does not see that the job has ended"
    NO_DIVERGENCE_CHECK = "a reader does not compare what comes twice"
    COMPARES_ONLY_OVERLAPS = "a reader reads the log strictly after its cursor"
