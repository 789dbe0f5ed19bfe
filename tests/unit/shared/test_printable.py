"""What others wrote commands no terminal and begins no log line."""

from __future__ import annotations

import io
import json
import logging

import pytest

from penstock.cli import output
from shared.logs import JsonFormatter, ProcessIdentity, TextFormatter
from shared.printable import printable, printable_line

HOSTILE = "a\x1b]52;c;ZXZpbA==\x07b\x9b31mc\u202ed\r\x7f\u2066e\nf\tg"
FORBIDDEN = set("\x1b\x07\x9b\u202e\r\x7f\u2066")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_controls_are_escaped_and_line_breaks_and_tabs_stay() -> None:
    assert not FORBIDDEN & set(printable(HOSTILE))
    assert printable(HOSTILE).endswith("e\nf\tg")
    assert "\n" not in printable_line(HOSTILE)
    assert printable("Grüße 東京 👩‍👩‍👧 \u05d0") == "Grüße 東京 👩‍👩‍👧 \u05d0"


@pytest.mark.parametrize("write", ["print_text", "print_dimmed", "print_table", "print_facts"])
def test_no_command_writes_them_to_a_terminal(monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    if write == "print_table":
        output.print_table(("a",), [(HOSTILE,)], "")
    elif write == "print_facts":
        output.print_facts([("a", HOSTILE)])
    else:
        getattr(output, write)(HOSTILE)
    written = terminal.getvalue()
    for own in ("\x1b[2m", "\x1b[22m", "\x1b[1m", "\x1b[0m"):
        written = written.replace(own, "")
    assert not FORBIDDEN & set(written)
    assert "52;c;" in written


def test_a_pipe_gets_a_text_as_it_is_and_json_its_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.print_text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE
    output.print_json({"text": HOSTILE})
    (line,) = capsys.readouterr().out.splitlines()
    assert not FORBIDDEN & set(line)
    assert json.loads(line) == {"text": HOSTILE}
    output.note(HOSTILE)
    assert not FORBIDDEN & set(capsys.readouterr().err)


@pytest.mark.parametrize("formatter", [JsonFormatter, TextFormatter])
def test_a_value_begins_no_line_of_the_log(formatter: type[logging.Formatter]) -> None:
    record = logging.makeLogRecord({"msg": f"m {HOSTILE}", "reason": HOSTILE, "levelname": "INFO"})
    line = formatter(ProcessIdentity("api")).format(record)  # type: ignore[arg-type]
    assert "\n" not in line
    assert not FORBIDDEN & set(line)
