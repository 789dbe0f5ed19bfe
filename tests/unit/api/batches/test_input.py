"""A batch's input: lines of a large file, what is wrong with them, and which of them are done."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from api.batches.input import (
    MAX_ERRORS,
    IdHashes,
    InputCheck,
    Line,
    LineReader,
    RowInvalid,
    parse_row,
)
from api.batches.rows import SPAN_LINES, LineWindow
from shared.transport.ports.batches import BatchProgress
from tests.support.service_client import resident_mib

ENDPOINT = "/v1/completions"
MAX_LINE = 1000


def row(custom_id: str | None, **changes: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "m"}}
    return json.dumps(line | changes).encode()


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read_all(path: Path, max_line: int = MAX_LINE, **begin: int) -> list[Line]:
    reader = LineReader(path, path.stat().st_size, max_line, **begin)
    lines: list[Line] = []
    while more := reader.read(7, 300):
        lines += more
    reader.close()
    return lines


def checked(lines: Sequence[Line], max_rows: int = 1000) -> InputCheck:
    check = InputCheck(ENDPOINT, max_rows, MAX_LINE)
    check.feed(lines)
    check.finish(Path(os.devnull), 0)  # of lines without repeated ids nothing is read again
    return check


def checked_file(path: Path) -> InputCheck:
    check = InputCheck(ENDPOINT, 1000, MAX_LINE)
    check.feed(read_all(path))
    check.finish(path, path.stat().st_size)
    return check


# --- lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n", b"a", b"a\n", b"\n\na\r\n\n", b"a\nb\nc"])
def test_lines_are_those_of_the_file(tmp_path: Path, content: bytes) -> None:
    lines = read_all(written(tmp_path / "x", content))
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line.data for line in lines] == expected
    assert [line.number for line in lines] == list(range(1, len(expected) + 1))
    assert not lines or lines[-1].end_offset == len(content)


def test_reading_goes_on_from_any_line(tmp_path: Path) -> None:
    rng = random.Random(5)
    content = b"\n".join(b"x" * rng.choice((0, 1, 50, 999, 1500)) for _ in range(500))
    path = written(tmp_path / "x", content)
    lines = read_all(path)
    assert sum(line.data is None for line in lines) > 50
    for place in rng.sample(range(len(lines) - 1), 20):
        before = lines[place]
        rest = read_all(path, line=before.number + 1, offset=before.end_offset)
        assert rest == lines[place + 1 :]


def test_a_line_that_is_too_long_is_passed_over_without_being_held(tmp_path: Path) -> None:
    content = b"a\n" + b"x" * 20_000_000 + b"\nb\n"
    path = written(tmp_path / "x", content)
    tracemalloc.start()
    try:
        lines = read_all(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [line.data for line in lines] == [b"a", None, b"b"]
    assert lines[1].end_offset == len(content) - 2
    assert peak < 3_000_000


def test_only_the_recorded_bytes_of_a_blob_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "x", b"a\nb\nc\n")
    reader = LineReader(path, 4, MAX_LINE)
    assert [line.data for line in reader.read(9, 999)] == [b"a", b"b"]
    assert reader.read(9, 999) == []
    assert reader.sha256 == hashlib.sha256(b"a\nb\n").hexdigest()
    reader.close()


@pytest.mark.promise(
    "Batches: a file of a million rows is never in memory, neither as an upload nor as a batch "
    "(100,000 rows (13 MiB in, 54 MiB out) grew their frontend by 12 MiB, once, by hand)"
)
def test_a_million_rows_are_checked_in_bounded_memory(tmp_path: Path) -> None:
    path, line = tmp_path / "rows", row("r%d") + b"\n"
    with path.open("wb") as file:
        for start in range(0, 1_000_000, 10_000):
            file.write(b"".join(line % (start + i) for i in range(10_000)))
    check = InputCheck(ENDPOINT, 1_000_000, MAX_LINE)
    reader = LineReader(path, path.stat().st_size, MAX_LINE)
    before = highest = resident_mib(os.getpid())
    while not reader.has_ended:
        check.feed(reader.read(4096, 1_000_000))
        highest = max(highest, resident_mib(os.getpid()))
    check.finish(path, path.stat().st_size)
    highest = max(highest, resident_mib(os.getpid()))
    reader.close()
    assert (check.num_rows, check.errors, check.model) == (1_000_000, [], "m")
    size_mib = path.stat().st_size / 2**20
    assert size_mib > 70
    assert highest - before < 32  # 20 bytes for each row, and one block of lines


# --- what is wrong with them ----------------------------------------------------------------------


def test_a_row_is_taken_apart() -> None:
    data = b"\xef\xbb\xbf" + row("a", body={"model": "m", "prompt": "p"}) + b"\r"
    parsed = parse_row(Line(1, 0, 0, data), ENDPOINT, MAX_LINE)
    assert (parsed.custom_id, parsed.model) == ("a", "m")
    assert json.loads(parsed.body) == {"model": "m", "prompt": "p"}


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"a":' * 900, "invalid_json_line", None),
        (b"{}", "missing_required_parameter", "custom_id"),
        (row("a", body=None), "missing_required_parameter", "body"),
        (row("a", body=[]), "invalid_body", "body"),
        (row(None), "missing_required_parameter", "custom_id"),
        (row(""), "invalid_custom_id", "custom_id"),
        (row("a", more=1), "unsupported_parameter", "more"),
        (row("a", method="PUT"), "invalid_method", "method"),
        (row("a", url="/v1/chat/completions"), "mismatched_endpoint", "url"),
        (None, "line_too_long", None),
    ],
)
def test_an_invalid_row_is_reported_with_line_code_and_param(
    data: bytes | None, code: str, param: str | None
) -> None:
    (error,) = checked([Line(1, 0, 0, row("fine")), Line(2, 0, 0, data)]).errors
    assert (error.line, error.code, error.param) == (2, code, param)
    assert error.message.endswith(".")


def test_a_repeated_id_names_the_line_it_repeats(tmp_path: Path) -> None:
    names = ["a", "b", "a", "c", "b", "a"]
    lines = [b"\xef\xbb\xbf" + row(names[0]), b"", *map(row, names[1:])]
    errors = checked_file(written(tmp_path / "x", b"\n".join(lines))).errors
    assert [error.line for error in errors] == [4, 6, 7]
    assert [error.message[-2] for error in errors] == ["1", "3", "1"]
    assert {error.code for error in errors} == {"duplicate_custom_id"}


def test_rows_with_equal_hashes_and_different_ids_are_no_duplicates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdHashes, "hash_of", lambda self, custom_id: ord(custom_id) % 2)
    path = written(tmp_path / "x", b"\n".join(map(row, "acegbdfga")))
    errors = checked_file(path).errors
    assert [(error.line, error.message[-2]) for error in errors] == [(8, "4"), (9, "1")]


def test_of_very_many_repeated_ids_the_first_errors_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x", b"\n".join([row("a")] * 900))
    errors = checked_file(path).errors
    assert [error.line for error in errors] == list(range(2, MAX_ERRORS + 2))


def test_a_row_that_changes_while_it_is_checked_is_no_duplicate(tmp_path: Path) -> None:
    path = written(tmp_path / "x", b"\n".join(map(row, "aa")))
    check = InputCheck(ENDPOINT, 1000, MAX_LINE)
    check.feed(read_all(path))
    path.write_bytes(b"x" * 200)
    with pytest.raises(RowInvalid):
        check.finish(path, 200)


def test_reading_stops_after_the_last_reportable_error() -> None:
    lines = [Line(number, 0, 0, b"{") for number in range(1, 1000)]
    check = checked(lines)
    assert (len(check.errors), check.num_rows, check.is_hopeless) == (MAX_ERRORS, MAX_ERRORS, True)
    many = checked([Line(number, 0, 0, row(f"r{number}")) for number in range(1, 9)], max_rows=5)
    assert [(error.code, error.line) for error in many.errors] == [("too_many_rows", 6)]
    assert many.is_hopeless


def test_an_empty_file_is_no_batch_and_blank_lines_do_not_count() -> None:
    assert [error.code for error in checked([Line(1, 0, 0, b" \r")]).errors] == ["empty_file"]
    check = checked([Line(1, 0, 0, b""), Line(2, 0, 0, row("a")), Line(3, 0, 0, b"\t")])
    assert (check.num_rows, check.errors) == (1, [])


def test_a_batch_of_several_models_names_none() -> None:
    both = [Line(1, 0, 0, row("a")), Line(2, 0, 0, row("b", body={"model": "n"}))]
    assert checked(both).model is None
    assert checked(both[:1]).model == "m"


# --- which of them are done ---------------------------------------------------------------------


def test_a_window_restored_at_any_moment_knows_what_was_done() -> None:
    rng = random.Random(11)
    progress, done = BatchProgress(), set[int]()
    total = 600
    while progress.low_line <= total:
        window = LineWindow(progress)
        begun = [
            line
            for line in range(window.low_line, min(total, window.low_line + 40) + 1)
            if window.begin(line, line * 10)
        ]
        assert not done & set(begun)
        assert set(range(1, window.low_line)) <= done
        for line in rng.sample(begun, rng.randint(0 if len(begun) > 1 else 1, len(begun))):
            window.finish(line)
            done.add(line)
        assert window.low_offset == (window.low_line - 1) * 10
        progress = BatchProgress(
            low_line=window.low_line, low_offset=window.low_offset, done_bits=window.done_bits
        )
    assert done == set(range(1, total + 1))
    assert progress.done_bits == 0


def test_what_an_earlier_owner_finished_counts_before_it_begins_here() -> None:
    window = LineWindow(BatchProgress(low_line=5, low_offset=40, done_bits=0b10110))
    assert window.done_bits == 0b10110
    assert window.begin(5, 50)
    window.finish(5)
    assert (window.low_line, window.low_offset, window.done_bits) == (6, 50, 0b1011)
    assert [window.begin(line, line * 10) for line in (6, 7, 8, 9)] == [False, False, True, False]
    assert (window.low_line, window.low_offset, window.done_bits) == (8, 70, 0b10)


def test_one_slow_row_does_not_let_the_window_grow_for_ever() -> None:
    window = LineWindow(BatchProgress())
    for line in range(1, SPAN_LINES + 1):
        assert not window.is_full
        window.begin(line, line)
        if line > 1:
            window.finish(line)
    assert window.is_full
    window.finish(1)
    assert (window.low_line, window.is_full) == (SPAN_LINES + 1, False)
