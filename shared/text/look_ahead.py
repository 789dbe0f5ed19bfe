"""Patterns with look-ahead at their start, written as several without: a text matches all of them.

Look-ahead is in no grammar. Libraries emit some of it: pydantic for Decimal, zod for email.
"""

from __future__ import annotations

import re

_CLASS = r"(?:\[\^?(?:\\.|[^\]\\])+\]|\\.|[^\\^$.|?*+()\[\]{}])"
_WHOLE = re.compile(rf"\^?({_CLASS})([*+])\$")
_BEGIN = re.compile(rf"\^?({_CLASS})+")
_INSIDE = re.compile(rf"\^?\.\*({_CLASS})({_CLASS})?")
_PART = re.compile(_CLASS)
_LOOK_AHEAD = re.compile(r"\(\?([=!])((?:\[(?:\\.|[^\]\\])*\]|\\.|[^\\()\[\]])*)\)")


def without_look_ahead(pattern: str) -> list[str] | None:
    """Returns the pattern without the look-aheads at its start, and one pattern for each. None if
    it has none there, or one that cannot be rewritten."""
    if not pattern.startswith("^"):
        return None
    begin, parts = 1, list[str]()
    while (found := _LOOK_AHEAD.match(pattern, begin)) is not None:
        part = _positive(found[2]) if found[1] == "=" else _negative(found[2])
        if part is None:
            return None
        parts.append(part)
        begin = found.end()
    rest = pattern[begin:]
    # An alternative at the top would have neither the look-ahead nor the anchor.
    has_alternatives = "|" in _without_groups(rest)
    return [f"^{rest}", *parts] if parts and not has_alternatives else None


def _without_groups(pattern: str) -> str:
    pattern, before = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern), ""
    while pattern != before:
        pattern, before = re.sub(r"\([^()]*\)", "", pattern), pattern
    return pattern


def _positive(inner: str) -> str | None:
    return f"^(?:{inner.removeprefix('^')})"


def _negative(inner: str) -> str | None:
    """Returns the pattern of texts that do not start with a match of `inner`; None if unknown."""
    if (found := _WHOLE.fullmatch(inner)) is not None:
        other = _complement(found[1])
        return other if found[2] == "*" else f"^$|{other}"
    if (found := _INSIDE.fullmatch(inner)) is not None:
        return _never(found[1], found[2])
    if _BEGIN.fullmatch(inner) is None:
        return None
    others = ""
    for part in reversed(_PART.findall(inner.removeprefix("^"))):
        rest = f"|{part}(?:{others})" if others else ""
        others = f"$|{_complement(part)}{rest}"
    return f"^(?:{others})"


def _never(first: str, second: str | None) -> str | None:
    """Returns the pattern of texts without such a character, or two of them in a row."""
    other = _complement(first)
    if second is None:
        return f"^{other}*$"
    if first == second:
        return f"^(?:{other}|{first}{other})*{first}?$"
    if first.startswith("[") or second.startswith("[") or first[0] == second[0] == "\\":
        return None  # the two might have characters in common
    return f"^(?:{other}|{first}+[^{first}{second}])*{first}*$"


def _complement(part: str) -> str:
    """Returns the class of all other characters."""
    if part.startswith("[^"):
        return f"[{part[2:]}"
    if part.startswith("["):
        return f"[^{part[1:]}"
    return f"[^{part}]"
