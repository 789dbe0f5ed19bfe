"""One reader: what it takes from the log and from its channel."""

from __future__ import annotations

from tests.sim.protocol.bugs import Bug
from tests.sim.protocol.world import (
    ABSENT,
    DIVERGED,
    FINISHED,
    FORGOTTEN,
    LOST,
    TERMINAL,
    Channel,
    Frame,
    Job,
    Reader,
    Tokens,
)

MAX_FRAMES = 2  # in a channel; what does not fit is dropped, all of it, and RESYNC comes instead


def publish(channel: Channel, frames: tuple[Frame, ...]) -> Channel:
    if not (channel.up and frames):
        return channel
    queued = channel.frames + frames
    if len(queued) > MAX_FRAMES:
        return channel._replace(resync=True, frames=())
    return channel._replace(frames=queued)


def look(reader: Reader, job: Job, bug: Bug | None) -> Reader:
    """Where the job stands: the log is read when that is not where the reader is."""
    has_ended = job.state in TERMINAL and bug is not Bug.LOOKS_AT_LENGTHS
    length = sum(map(len, job.log))
    is_gone = job.state in (ABSENT, FORGOTTEN)
    if length == len(reader.got) and not (has_ended or is_gone or reader.doubts):
        return reader
    return read_log(reader, job, bug)


def resync(reader: Reader, job: Job, bug: Bug | None) -> Reader:
    """The log is read; where it is too short to be compared, it is at the looks that follow."""
    is_shorter = sum(map(len, job.log)) < len(reader.got)
    return read_log(reader, job, bug)._replace(doubts=is_shorter)


def read_log(reader: Reader, job: Job, bug: Bug | None) -> Reader:
    """Everything from the cursor on: first the entry that ends there, to compare it again."""
    if job.state in (ABSENT, FORGOTTEN):
        return reader._replace(end=LOST)
    start = 0
    if sum(map(len, job.log)) >= len(reader.got):
        reader = reader._replace(doubts=False)
    for part in job.log:
        end = start + len(part)
        if reader.end:
            return reader
        has_news = end > len(reader.got)
        if has_news or (end == len(reader.got) and bug is not Bug.COMPARES_ONLY_OVERLAPS):
            reader = _take(reader, start, part, bug)
        start = end
    if job.state in TERMINAL and not reader.end:
        reader = _end(reader, start, job.state)
    return reader


def hear(reader: Reader, frame: Frame, bug: Bug | None) -> Reader | None:
    """None: something is missing before this frame, the log has it."""
    is_ahead = frame.start > len(reader.got)
    if frame.end:
        if is_ahead and bug is not Bug.END_BEFORE_TEXT:
            return None
        if bug is Bug.END_BEFORE_TEXT:
            return reader._replace(end=frame.end)
        return _end(reader, frame.start, frame.end)
    if is_ahead:
        if bug is not Bug.NO_GAP_CHECK:
            return None
        return reader._replace(got=reader.got + frame.tokens)
    return _take(reader, frame.start, frame.tokens, bug)


def _take(reader: Reader, start: int, tokens: Tokens, bug: Bug | None) -> Reader:
    """Trims what is known by position, after comparing it."""
    known = len(reader.got) - start
    differs = tokens[:known] != reader.got[start : start + len(tokens)]
    if differs and bug is not Bug.NO_DIVERGENCE_CHECK:
        return reader._replace(end=DIVERGED)
    return reader._replace(got=reader.got + tokens[known:])


def _end(reader: Reader, length: int, state: str) -> Reader:
    if state == FINISHED and length != len(reader.got):
        return reader._replace(end=DIVERGED)
    return reader._replace(end=state)
