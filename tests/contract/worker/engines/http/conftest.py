"""Engines in front of scripted upstreams, and their requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.messages import SamplingParams
from shared.text.checkpoint_text import load_tokenizer_and_eos
from tests.support.checkpoints import make_checkpoint
from tests.support.scripted_upstream import ScriptedUpstream
from worker.engine.request import EngineOutput, EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.http.build import build_http_engine
from worker.engines.http.engine import HttpEngine

PROMPT = [11, 12, 13]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Made:
    """Upstreams of one checkpoint, and engines in front of them."""

    def __init__(self, checkpoint: Path, stack: ExitStack) -> None:
        self.checkpoint, self._stack = checkpoint, stack
        self.tokenizer, self.eos = load_tokenizer_and_eos(checkpoint)

    def upstream(
        self, kind: type[ScriptedUpstream] = ScriptedUpstream, **settings: str
    ) -> ScriptedUpstream:
        return self._stack.enter_context(kind(self.tokenizer, **settings))

    def engine(self, *upstreams: ScriptedUpstream, urls: str = "", **options: str) -> HttpEngine:
        urls = urls or ",".join(upstream.url for upstream in upstreams)
        given = EngineOptions(
            checkpoint=str(self.checkpoint), engine="http", upstream_urls=urls, **options
        )
        built = build_http_engine(given, lambda stage, share: None)
        assert isinstance(built.engine, HttpEngine)
        self._stack.callback(built.engine.close)
        return built.engine


@pytest.fixture
def made(checkpoint: Path, stack: ExitStack) -> Made:
    return Made(checkpoint, stack)


def request(name: str = "a", prompt: Sequence[int] = PROMPT, **params: object) -> EngineRequest:
    given = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **params}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**given),  # type: ignore[arg-type]
    )


def run(engine: HttpEngine, requests: Iterable[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """Returns the outputs of each request; AssertionError after a minute."""
    outputs: dict[str, list[EngineOutput]] = {}
    for each in requests:
        engine.add(each)
    end_s = time.monotonic() + 60
    while engine.has_unfinished():
        assert time.monotonic() < end_s, outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: Iterable[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]
