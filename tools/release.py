"""Checks of a release, and its notes.

python -m tools.release check v0.1.0    # tag, pyproject.toml and CHANGELOG.md have one
python -m tools.release notes v0.1.0    # the changelog's section of it
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SECTION = re.compile(r"^## (\d+\.\d+\.\d+)(?: - (\d{4}-\d\d-\d\d|unreleased))?$", re.M)


class NotReady(Exception):
    """The tree is not the release of this tag; the text is a sentence."""


def version() -> str:
    """Returns the version in pyproject.toml."""
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found


def sections(changelog: str) -> dict[str, tuple[str, str]]:
    """Returns the date, or "unreleased", and the text of each version's section, newest first."""
    heads = list(_SECTION.finditer(changelog))
    ends = [head.start() for head in heads[1:]] + [len(changelog)]
    return {
        head[1]: (head[2] or "", changelog[head.end() : end].strip())
        for head, end in zip(heads, ends, strict=True)
    }


def check(tag: str, changelog: str, number: str) -> str:
    """Returns the notes of the release of `tag`. Raises NotReady."""
    if tag != f"v{number}":
        raise NotReady(f"the tag is {tag}, pyproject.toml has {number}.")
    found = sections(changelog)
    if number not in found:
        raise NotReady(f"CHANGELOG.md has no section {number}.")
    date, text = found[number]
    if next(iter(found)) != number:
        raise NotReady(f"CHANGELOG.md has newer sections than {number}.")
    if date in ("", "unreleased"):
        raise NotReady(f"CHANGELOG.md has no date for {number}.")
    if not text:
        raise NotReady(f"CHANGELOG.md has an empty section {number}.")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for a tree that is not of this release, 2 for bad arguments."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 2 or words[0] not in ("check", "notes"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        text = check(words[1], (ROOT / "CHANGELOG.md").read_text(), version())
    except NotReady as error:
        print(error, file=sys.stderr)
        return 1
    print(text if words[0] == "notes" else f"{words[1]} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
