"""A prompt's log probabilities leave the worker in slices, before its first token."""

from __future__ import annotations

import pytest

from shared.messages import PROMPT_SLICE_TOKENS, START, PromptLogprob, PromptSlice
from shared.prompt_logprobs import decode_prompt_logprobs
from shared.transport.ports.queue import Append
from tests.unit.worker.test_outbox import END
from worker.outbox import Outbox, PromptLog

ENTRIES = [PromptLogprob(i, -0.5, 1) for i in range(2 * PROMPT_SLICE_TOKENS + 3)]


def taken(prompt: PromptLog) -> list[PromptSlice]:
    slices = []
    while (part := prompt.next_slice) is not None:
        slices.append(part)
        prompt.accept()
    return slices


@pytest.mark.parametrize("chunk", [1, 7, 512, 700, 5000])
def test_slices_do_not_depend_on_how_the_prompt_was_cut(chunk: int) -> None:
    prompt = PromptLog(len(ENTRIES))
    slices = []
    for begin in range(0, len(ENTRIES), chunk):
        prompt.add(ENTRIES[begin : begin + chunk])
        slices += taken(prompt)
    assert prompt.num_slices == len(slices) == 3
    assert [part.index for part in slices] == [0, 1, 2]
    entries = [decode_prompt_logprobs(part.entries) for part in slices]
    assert [len(part) for part in entries] == [PROMPT_SLICE_TOKENS, PROMPT_SLICE_TOKENS, 3]
    assert [entry for part in entries for entry in part] == ENTRIES


def outbox(prompt: PromptLog) -> Outbox:
    return Outbox("0-a", 1, START, (), prompt=prompt)


def reply(box: Outbox) -> list[Append]:
    items = []
    while box.has_something:
        items.append(box.next_append())
        box.accept()
    return items


def test_an_outbox_sends_slices_then_output_and_all_again_after_a_loss() -> None:
    box = outbox(PromptLog(len(ENTRIES)))
    box.add_of_prompt(ENTRIES)
    assert box.next_append() is box.next_append(), "unchanged until it is settled"
    box.add((1,), "a", None)
    for _ in range(2):
        *slices, output = reply(box)
        assert [item.prompt_slice and item.prompt_slice.index for item in slices] == [0, 1, 2]
        assert all(item.delta.token_ids == () for item in slices)
        assert (output.prompt_slice, output.num_prompt_slices) == (None, 3)
        assert output.delta.token_ids == (1,)
        assert box.rewind(START)
    reply(box)
    box.finish(END)
    (last,) = reply(box)
    assert last.end_of_job is END
    assert box.over


def test_a_job_that_fails_says_no_more_of_its_prompt() -> None:
    box = outbox(PromptLog(len(ENTRIES)))
    box.add_of_prompt(ENTRIES)
    box.next_append()
    box.fail(END)
    (last,) = reply(box)
    assert (last.prompt_slice, last.end_of_job) == (None, END)


def test_a_later_attempt_has_the_slices_of_the_log() -> None:
    first = PromptLog(len(ENTRIES))
    first.add(ENTRIES)
    slices = taken(first)
    prompt = PromptLog.of_log(slices)
    assert (prompt.num_slices, prompt.next_slice) == (3, None)
    prompt.rewind()
    assert taken(prompt) == slices
