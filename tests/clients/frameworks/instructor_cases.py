"""instructor in its modes: python instructor_cases.py <base url> <model>"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import instructor
from openai import AsyncOpenAI, OpenAI
from station import MAX_TOKENS, QUESTION, TIMEOUT_S, TWO_CALLS, Reading, main, model, openai_url

OPENAI = {"base_url": openai_url, "api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
ASKED: dict[str, Any] = {
    "model": model,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "max_retries": 0,
}


def typed(**options: Any) -> Callable[[], Any]:
    """Without a mode: instructor's own, which names the function that it wants called."""

    async def case() -> dict[str, Any]:
        client = instructor.from_openai(AsyncOpenAI(**OPENAI), **options)
        reading, answer = await client.chat.completions.create_with_completion(
            response_model=Reading, **ASKED
        )
        assert isinstance(reading, Reading)
        return {"whole": reading.model_dump(), "tokens": answer.usage.completion_tokens}

    return case


async def partial() -> dict[str, Any]:
    """The object as it fills up."""
    client = instructor.from_openai(AsyncOpenAI(**OPENAI))
    seen = []
    async for part in client.chat.completions.create_partial(response_model=Reading, **ASKED):
        seen.append(part.model_dump())
    return {"first": seen[0], "whole": seen[-1], "pieces": len(seen)}


def several() -> list[dict[str, Any]]:
    """Several objects in one answer."""
    client = instructor.from_openai(OpenAI(**OPENAI), mode=instructor.Mode.PARALLEL_TOOLS)
    found = client.chat.completions.create(
        response_model=Iterable[Reading],
        **ASKED,
        # The mode itself leaves it to the model whether it calls.
        extra_body={**TWO_CALLS, "tool_choice": "required"},
    )
    return [reading.model_dump() for reading in found]


main(
    {
        "default": typed(),
        "tools_strict": typed(mode=instructor.Mode.TOOLS_STRICT),
        "json_schema": typed(mode=instructor.Mode.JSON_SCHEMA),
        "partial": partial,
        "several": several,
    }
)
