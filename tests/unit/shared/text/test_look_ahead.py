"""Look-ahead at the start of a pattern: several patterns that match the same texts together."""

from __future__ import annotations

import random
import re

import pytest

from shared.text.look_ahead import without_look_ahead

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's
EMAIL = (  # zod's
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)


@pytest.mark.parametrize(
    "pattern",
    [
        DECIMAL,
        EMAIL,
        "^(?!x)[a-x]*$",
        "^(?!abc)[a-c]*$",
        "^(?!.*ab)[abc]*$",
        "^(?!.*a)[abc]*$",
        r"^(?!0+$)[0-9]{1,3}$",
        r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{2,8}$",
        "^(?!a)(b|[a-c]+)$",
    ],
)
def test_the_patterns_together_match_what_the_one_matches(pattern: str) -> None:
    parts = without_look_ahead(pattern)
    assert parts is not None
    assert not any("(?=" in part or "(?!" in part for part in parts)
    chooser, found = random.Random(7), set()
    for _ in range(20_000):
        text = "".join(chooser.choice("abcx.@+-01A") for _ in range(chooser.randrange(9)))
        matches = re.search(pattern, text) is not None
        assert all(re.search(part, text) for part in parts) == matches, text
        found.add(matches)
    assert found == {True, False}


@pytest.mark.parametrize(
    "pattern",
    ["^abc$", "a(?!b)", "^(?<!a)b", "^(?!a|b)c$", "^(?!a)b|c", r"^(?!.*[ab][bc])a$", "^(?!(a))b"],
)
def test_others_stay_as_they_are(pattern: str) -> None:
    assert without_look_ahead(pattern) is None
