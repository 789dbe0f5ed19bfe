"""What every agent's report has to show, in Python and in Node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DEMO = "penstock-demo-tools"  # the model's name
GATES, UNITS = ("north", "south", "weir"), ("metres", "feet")
LEVEL = "seven metres"  # what the tool answers


def check_calls(called: Sequence[dict[str, Any]], count: int) -> None:
    """The tool ran so often, each time with arguments that its schema allows."""
    assert len(called) == count
    for arguments in called:
        assert arguments.keys() == {"gate", "unit"}
        assert arguments["gate"] in GATES
        assert arguments["unit"] in UNITS


def check_reading(reading: dict[str, Any]) -> None:
    """A typed answer."""
    level = reading["level"]
    assert reading.keys() == {"gate", "unit", "level"}
    assert isinstance(level, int)
    assert 0 <= level <= 9
    check_calls([{"gate": reading["gate"], "unit": reading["unit"]}], 1)


def check_tokens(tokens: Sequence[int]) -> None:
    """The prompts and the answers of all requests were counted."""
    num_input, num_output = tokens
    assert num_input > 100
    assert num_output > 10
