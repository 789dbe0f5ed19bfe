"""A service with models that know tools and reasoning: a frontend, and a worker for each of them.

The models named ECHO_... repeat their prompt, which begins with the first system message: a test
writes down what the model is to say, and asks it to stop at STOP. ENFORCED... compute, at random:
what it says is right because a grammar keeps it so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import new_namespace
from tests.support.running_service import frontend_of_workers
from tests.support.tool_models import (
    make_family_checkpoint,
    make_hermes_checkpoint,
    make_llama3_checkpoint,
)

ECHO_HERMES, ECHO_LLAMA3, ENFORCED = "echo-hermes", "echo-llama3", "enforced"
ECHO_GPT_OSS, ECHO_MISTRAL = "echo-gpt-oss", "echo-mistral"
ECHO_GLM, ECHO_LLAMA4 = "echo-glm", "echo-llama4"
ENFORCED_GPT_OSS = "enforced-gpt-oss"
STOP = "|end|"


def _family(name: str) -> Callable[[Path], Path]:
    return functools.partial(make_family_checkpoint, family=name)


_MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    ECHO_HERMES: (make_hermes_checkpoint, "echo"),
    ECHO_LLAMA3: (make_llama3_checkpoint, "echo"),
    ENFORCED: (make_hermes_checkpoint, "model"),
    ECHO_GPT_OSS: (_family("gpt-oss"), "echo"),
    ECHO_MISTRAL: (_family("magistral"), "echo"),
    ECHO_GLM: (_family("glm"), "echo"),
    ECHO_LLAMA4: (_family("llama4"), "echo"),
    ENFORCED_GPT_OSS: (_family("gpt-oss"), "model"),
}


@contextmanager
def chat_service(redis_url: str, directory: Path, models: Sequence[str]) -> Iterator[str]:
    """The base URL of a service that has these models ready."""
    made = {
        name: {
            "MODEL": str(_MODELS[name][0](directory / name)),
            "RUNNER": _MODELS[name][1],
            "DEVICE": "cpu",
            "CPU_TIER": "reference",
            "DTYPE": "float32",
            "KV_CACHE_MEMORY_GB": "0.05",
        }
        for name in models
    }
    with frontend_of_workers(
        redis_url, new_namespace(), directory, made, keepalive_s=0.5
    ) as frontend:
        yield frontend.base_url


def module_chat_service(*models: str) -> Any:
    """A module's `base_url` fixture, of a service that has these models ready."""

    @pytest.fixture(scope="module")
    def base_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with chat_service(redis_url, tmp_path_factory.mktemp("chat"), models) as url:
            yield url

    return base_url


def saying(text: str, *after: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that an echoing model answers with `text`, if it stops at STOP."""
    return [
        {"role": "system", "content": text + STOP},
        *(after or ({"role": "user", "content": "Go on."},)),
    ]


def hermes_call(name: str, arguments: str) -> str:
    """A call as Hermes' format writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
