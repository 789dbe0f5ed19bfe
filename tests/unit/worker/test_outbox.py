from __future__ import annotations

from shared.choice_deltas import chain_links
from shared.messages import (
    START,
    Cursor,
    Delta,
    FinishReason,
    JobState,
    Segment,
    TokenLogprob,
    Usage,
)
from shared.transport.ports.queue import JobEnd
from shared.transport.wire import chain_hash
from worker.outbox import MAX_APPEND_TOKENS, MAX_PIECES, Outbox

END = JobEnd(state=JobState.FINISHED, reason=FinishReason.STOP, usage=Usage(1, 1))


def outbox(end: Cursor = START, token_ids: tuple[int, ...] = ()) -> Outbox:
    return Outbox("0-a", 1, end, token_ids)


def test_everything_unsent_travels_in_one_append() -> None:
    box = outbox()
    box.add((1, 2), "é", None)
    box.add((3,), "x", None)
    append = box.next_append()
    assert (append.delta.start, append.delta.end) == (START, Cursor(3, 3))
    assert (append.delta.token_ids, append.delta.text) == ((1, 2, 3), "éx")
    assert (append.start_hash, append.end_hash) == ("", chain_hash("", (1, 2, 3)))
    assert append.end_of_job is None


def test_an_unsettled_append_is_offered_again_unchanged() -> None:
    box = outbox()
    box.add((1,), "a", None)
    first = box.next_append()
    box.add((2,), "b", None)
    assert box.next_append() is first
    box.accept()
    second = box.next_append()
    assert (second.delta.start, second.delta.end) == (Cursor(1, 1), Cursor(2, 2))
    assert second.start_hash == first.end_hash


def test_an_end_that_comes_after_the_offer_goes_with_the_next_append() -> None:
    box = outbox()
    box.add((1,), "a", None)
    box.next_append()
    box.finish(END)
    box.accept()
    assert not box.over
    assert box.has_something
    last = box.next_append()
    assert last.end_of_job is END
    assert last.delta.start == last.delta.end == Cursor(1, 1)
    box.accept()
    assert box.over


def test_a_resumed_job_goes_on_where_its_log_ends() -> None:
    box = outbox(Cursor(2, 5), (7, 8))
    box.add((9,), "z", None)
    append = box.next_append()
    assert (append.delta.start, append.delta.end) == (Cursor(2, 5), Cursor(3, 6))
    assert append.start_hash == chain_hash("", (7, 8))
    assert append.end_hash == chain_hash("", (7, 8, 9))
    assert not box.is_first


def test_a_log_that_lost_its_tail_is_filled_again() -> None:
    box = outbox()
    for token_id, text in ((1, "a"), (2, "b"), (3, "c")):
        box.add((token_id,), text, None)
        box.next_append()
        box.accept()
    box.add((4,), "d", None)
    box.next_append()
    assert box.rewind(Cursor(1, 1))
    append = box.next_append()
    assert (append.delta.start, append.delta.end) == (Cursor(1, 1), Cursor(4, 4))
    assert (append.delta.token_ids, append.delta.text) == ((2, 3, 4), "bcd")
    assert append.start_hash == chain_hash("", (1,))
    assert append.end_hash == chain_hash("", (1, 2, 3, 4))


def test_a_log_that_ends_where_we_never_stopped_cannot_be_filled() -> None:
    box = outbox(Cursor(2, 2), (1, 2))
    box.add((3, 4), "xy", None)
    assert not box.rewind(Cursor(1, 1))
    assert not box.rewind(Cursor(3, 3))
    assert not box.rewind(Cursor(9, 9))


def test_held_back_text_alone_is_not_sent_before_the_end() -> None:
    box = outbox()
    box.add((), "tail", None)
    assert not box.has_something
    box.finish(END)
    append = box.next_append()
    assert (append.delta.start, append.delta.end) == (START, Cursor(0, 4))
    assert append.delta.token_ids == ()


def test_logprobs_travel_with_their_tokens() -> None:
    box = outbox()
    entries = [TokenLogprob(t, -0.5) for t in (1, 2)]
    box.add((1,), "a", entries[:1])
    box.next_append()
    box.accept()
    box.add((2,), "b", entries[1:])
    assert box.next_append().delta.logprobs == (entries[1],)


def test_pieces_of_one_choice_are_separated_where_there_are_several() -> None:
    box = outbox()
    box.add((1,), "a", None)
    assert box.next_append().delta.segments is None
    box.accept()
    box.add((2, 3), "é", None)
    box.add((4,), "", None)
    box.add((5,), "bc", None)
    delta = box.next_append().delta
    assert delta.segments == (Segment(0, 2, 2), Segment(0, 1, 0), Segment(0, 1, 2))
    assert box.next_append().end_hash == chain_hash("", (1, 2, 3, 4, 5))


def test_a_large_backlog_merges_neighbouring_pieces() -> None:
    alone = outbox()
    for token_id in range(MAX_PIECES + 1):
        alone.add((token_id,), "a", None)
    pairs = (Segment(0, 2, 2),) * (MAX_PIECES // 2)
    assert alone.next_append().delta.segments == (*pairs, Segment(0, 1, 1))
    several = outbox()
    for token_id in range(MAX_PIECES + 1):
        several.add((token_id,), "a", None, Segment(token_id // 100, 1, 1))
    num_last = MAX_PIECES + 1 - 100
    assert several.next_append().delta.segments == (
        Segment(0, 100, 100),
        Segment(1, num_last, num_last),
    )


def test_pieces_of_several_choices_are_separated() -> None:
    box = outbox()
    stop = FinishReason.STOP
    box.add((1,), "a", None, Segment(0, 1, 1))
    box.add((2,), "é", None, Segment(0, 1, 2, stop, "x"))
    box.add((3,), "b", None, Segment(1, 1, 1))
    delta = box.next_append().delta
    assert (delta.token_ids, delta.text) == ((1, 2, 3), "aéb")
    assert delta.segments == (Segment(0, 1, 1), Segment(0, 1, 2, stop, "x"), Segment(1, 1, 1))


def test_a_choices_end_without_a_token_waits_for_some_other_token() -> None:
    box = outbox()
    box.add((1,), "a", None, Segment(0, 1, 1))
    box.next_append()
    box.accept()
    box.add((), "", None, Segment(0, 0, 0, FinishReason.LENGTH))
    assert not box.has_something
    box.add((2,), "b", None, Segment(1, 1, 1))
    assert box.has_something
    segments = (Segment(0, 0, 0, FinishReason.LENGTH), Segment(1, 1, 1))
    assert box.next_append().delta.segments == segments


def test_a_log_of_several_choices_that_lost_its_tail_is_filled_again() -> None:
    box = outbox()
    for choice in (0, 1, 0):
        box.add((7,), "a", None, Segment(choice, 1, 1))
        box.next_append()
        box.accept()
    box.add((7,), "d", None, Segment(1, 1, 1))
    assert box.rewind(Cursor(2, 2))
    append = box.next_append()
    assert append.delta.segments == (Segment(0, 1, 1), Segment(1, 1, 1))
    other = 7 + (1 << 32)
    assert append.start_hash == chain_hash("", (7, other))
    assert append.end_hash == chain_hash("", (7, other, 7, other))


def test_a_failed_outbox_of_several_choices_says_its_end_only() -> None:
    box = outbox()
    box.add((1,), "a", None, Segment(1, 1, 1))
    failure = JobEnd(state=JobState.FAILED, reason="engine_error", usage=Usage(1, 1))
    box.fail(failure)
    delta = box.next_append().delta
    assert (delta.token_ids, delta.segments) == ((), None)


def test_a_failed_outbox_says_its_end_only() -> None:
    box = outbox()
    box.add((1,), "a", None)
    box.next_append()
    box.accept()
    box.add((2,), "b", None)
    box.finish(END)
    box.next_append()
    failure = JobEnd(state=JobState.FAILED, reason="engine_error", usage=Usage(1, 1))
    box.fail(failure)
    append = box.next_append()
    assert append.end_of_job is failure
    assert append.delta.start == append.delta.end == Cursor(1, 1)
    assert append.delta.token_ids == ()


def logged() -> tuple[Delta, ...]:
    """Three pieces in two entries: an earlier attempt's output."""
    pieces = (Segment(0, 1, 2), Segment(0, 1, 1))
    return (
        Delta(START, Cursor(2, 3), (5, 6), "éf", None, pieces),
        Delta(Cursor(2, 3), Cursor(3, 4), (7,), "g"),
    )


def test_a_resumed_log_that_was_lost_is_written_again_from_its_start() -> None:
    box = Outbox("0-a", 2, Cursor(3, 4), (5, 6, 7), logged=logged())
    assert (box.accepted, box.has_something) == (Cursor(3, 4), False)
    box.add((8,), "h", None)
    assert box.next_append().start_hash == chain_hash("", (5, 6, 7))
    assert box.rewind(START)
    append = box.next_append()
    assert (append.delta.start, append.delta.end) == (START, Cursor(4, 5))
    assert (append.delta.token_ids, append.delta.text) == ((5, 6, 7, 8), "éfgh")
    assert (append.start_hash, append.end_hash) == ("", chain_hash("", (5, 6, 7, 8)))
    box.accept()
    assert box.rewind(Cursor(2, 3))  # within the earlier attempt's
    assert box.next_append().delta.token_ids == (7, 8)


def test_of_a_resumed_log_of_several_choices_every_piece_keeps_its_choice() -> None:
    pieces = (Segment(1, 1, 1), Segment(0, 1, 1, FinishReason.LENGTH))
    log = (Delta(START, Cursor(2, 2), (5, 6), "ef", None, pieces),)
    links = chain_links((5, 6), pieces)
    box = Outbox("0-a", 2, Cursor(2, 2), links, logged=log, has_choices=True)
    box.add((7,), "g", None, Segment(1, 1, 1))
    assert box.rewind(START)
    append = box.next_append()
    assert append.delta.segments == (*pieces, Segment(1, 1, 1))
    assert append.end_hash == chain_hash("", chain_links((5, 6, 7), append.delta.segments))


def test_without_its_log_nothing_can_be_replayed() -> None:
    box = Outbox("0-a", 2, Cursor(3, 4), (5, 6, 7))
    assert not box.rewind(START)


def test_a_long_log_is_written_again_in_parts_and_the_end_goes_with_the_last() -> None:
    box, number = outbox(), 2 * MAX_APPEND_TOKENS + 1
    for token_id in range(number):
        box.add((token_id,), "x", None)
    box.finish(END)
    sent: list[int] = []
    while not box.over:
        append = box.next_append()
        assert len(append.delta.token_ids) <= MAX_APPEND_TOKENS
        sent += append.delta.token_ids
        assert (append.end_of_job is END) == (len(sent) == number)
        box.accept()
    assert sent == list(range(number))
    assert box.accepted == Cursor(number, number)
