"""What the agents of all frameworks are given: tools with bounded arguments, and a way to report.

The model calls tools rightly only because a grammar keeps it so; what a tool was called with is
checked against its schema here, whatever the framework checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Gate = Literal["north", "south", "weir"]
Unit = Literal["metres", "feet"]
QUESTION = "How deep is the water?"
LEVEL = "seven metres"
# Where nothing else is said a turn ends by itself: after the one call that it may have, or after
# the sentence with which the demo model answers questions like this one.
MAX_TOKENS = 400
END_OF_TURN = {"2": 100}  # drawn as soon as `min_tokens` and the grammar let it be
# A text has as many tokens; a turn that has to call has one call, which is longer.
SHORT = {"min_tokens": 8, "logit_bias": END_OF_TURN}
# One call of `read_gauge` has fewer tokens and two have more.
TWO_CALLS = {"min_tokens": 60, "logit_bias": END_OF_TURN}
TIMEOUT_S = 300.0

base_url, model = sys.argv[1:]
openai_url = f"{base_url}/v1"


class Asked(BaseModel):
    """What `read_gauge` takes."""

    gate: Gate
    unit: Unit


class Reading(BaseModel):
    """What a gauge shows."""

    model_config = ConfigDict(extra="forbid")

    gate: Gate
    unit: Unit
    level: int = Field(ge=0, le=9)


class Station:
    """The tools, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def read_gauge(self, gate: Gate, unit: Unit) -> str:
        """Reads a gauge.

        Args:
            gate: Which gate.
            unit: The unit of the answer.
        """
        self.calls.append(Asked(gate=gate, unit=unit).model_dump())
        return LEVEL


async def _outcome(case: Callable[[], Any]) -> Any:
    try:
        value = case() if asyncio.iscoroutinefunction(case) else asyncio.to_thread(case)
        return await value
    except BaseException:
        return {"raised": traceback.format_exc()}


def main(cases: dict[str, Callable[[], Any] | Callable[[], Awaitable[Any]]]) -> None:
    """Runs all cases at once; says what became of each, as one JSON object."""

    async def run() -> dict[str, Any]:
        outcomes = await asyncio.gather(*map(_outcome, cases.values()))
        return dict(zip(cases, outcomes, strict=True))

    with contextlib.redirect_stdout(sys.stderr):  # some agents draw
        result = asyncio.run(run())
    print(json.dumps(result))
