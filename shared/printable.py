"""Text that others wrote, for terminals and log lines: no character of it commands anything."""

from __future__ import annotations

import re

# C0 and C1 controls but line break and tab, and what turns the direction of text.
_COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Returns the text with each control character as its JSON escape, such as `\\u001b`."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_line(text: str) -> str:
    """Returns the text as one line: line breaks and tabs are escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")
