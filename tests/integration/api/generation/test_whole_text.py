"""Streamed text is unstreamed text, byte for byte: any script, any tokens, with stops and without.

Two models: one repeats the tokens of its prompt, so that a test chooses what it says, broken UTF-8
included; one computes with random weights, and most of what it says is no text at all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.integration.api.chat_service import ENFORCED, chat_service
from tests.support.running_service import MODEL, RunningService

TIMEOUT_S = 60
TEXTS = {
    "emoji": "😀😃👍🏽🇳🇴🏳️‍🌈1️⃣🫠🧿",
    "families": "👨‍👩‍👧‍👦 👩🏽‍🚀 ❤️‍🔥 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "cjk": "漢字仮名交じり文、한국어 텍스트，繁體中文𠮷野家𓀀",
    "marks": "Z͑ͫ̓ͪ̂ͫ̽a̴̵̞l̠g̶o n̈ǹé e\u0301 \u1100\u1161\u11a8 ক্ষি नमस्ते",
    "directions": "שָׁלוֹם العَرَبِيَّة \u202eright\u202c \u200b\u200c\u200d\ufeff",
    "ends of lines": "a\r\nb\rc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ei\x00j",
}


def data_of(answer: httpx.Response) -> list[dict[str, Any]]:
    # Only what the protocol calls a line end is one here.
    lines = [line[6:] for line in answer.content.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Dialect:
    """One route: its body for a prompt, and where the text is in its answers."""

    path: str
    body: Callable[[Any], dict[str, Any]]
    stop: str | None
    whole: Callable[[dict[str, Any]], str]
    piece: Callable[[dict[str, Any]], str]

    def send(self, base_url: str, prompt: Any, *, stream: bool, **members: Any) -> str:
        body = {**self.body(prompt), **members, "stream": stream}
        answer = httpx.post(base_url + self.path, json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        if not stream:
            return self.whole(answer.json())
        return "".join(map(self.piece, data_of(answer)))


def conversation(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def of_items(items: list[dict[str, Any]], member: str) -> str:
    return "".join(item.get(member) or "" for item in items)


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        conversation,
        "stop",
        lambda whole: whole["choices"][0]["message"]["content"],
        lambda chunk: of_items([choice["delta"] for choice in chunk["choices"]], "content"),
    ),
    "completion": Dialect(
        "/v1/completions",
        lambda prompt: {"prompt": prompt},
        "stop",
        lambda whole: whole["choices"][0]["text"],
        lambda chunk: of_items(chunk["choices"], "text"),
    ),
    "generate": Dialect(
        "/generate",
        lambda prompt: {"prompt": prompt},
        "stop",
        lambda whole: whole["text"],
        lambda event: event["text"],
    ),
    "message": Dialect(
        "/v1/messages",
        conversation,
        "stop_sequences",
        lambda whole: of_items(whole["content"], "text"),
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    "response": Dialect(
        "/v1/responses",
        lambda prompt: {"input": prompt},
        None,
        lambda whole: of_items(
            [part for item in whole["output"] for part in item["content"]], "text"
        ),
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
}
LIMIT = {"response": "max_output_tokens"}  # how the others call max_tokens


def same_both_ways(name: str, base_url: str, prompt: Any, num_tokens: int, **members: Any) -> str:
    """The text, once it was seen to be the same whole and streamed."""
    dialect = DIALECTS[name]
    members = {LIMIT.get(name, "max_tokens"): num_tokens, **members}
    whole = dialect.send(base_url, prompt, stream=False, **members)
    streamed = dialect.send(base_url, prompt, stream=True, **members)
    assert streamed.encode() == whole.encode()
    return whole


@pytest.mark.promise(
    "Clients: streamed text equals unstreamed text, byte for byte, also with invalid bytes"
)
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", DIALECTS)
def test_text_of_any_script_comes_whole(service: RunningService, name: str, kind: str) -> None:
    text = TEXTS[kind]
    model = {"model": MODEL}
    for tokens_per_step, num_tokens in ((1, 150), (5, 150), (1, 31)):  # 31: within a character
        service.script.tokens_per_step = tokens_per_step
        output = same_both_ways(name, service.base_url, text, num_tokens, **model)
        assert "\ufffd" not in output[:-1]
        if num_tokens == 150:
            assert text[:20] in output


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.stop])
def test_a_stop_of_any_script_cuts_both_at_one_place(
    service: RunningService,
    name: str,
    kind: str,
) -> None:
    member = DIALECTS[name].stop
    assert member is not None
    full = same_both_ways(name, service.base_url, TEXTS[kind], 60, model=MODEL)
    chooses = random.Random(kind)
    for tokens_per_step in (1, 4):
        service.script.tokens_per_step = tokens_per_step
        for length in (1, 2, 5):
            at = chooses.randrange(len(full) // 3, len(full) - length)
            stop = full[at : at + length]
            stops = {member: [stop, stop + "never", "never"], "model": MODEL}
            output = same_both_ways(name, service.base_url, TEXTS[kind], 60, **stops)
            assert output == full.partition(stop)[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["completion", "generate"])
def test_tokens_that_are_no_text_come_out_the_same(
    service: RunningService,
    name: str,
    seed: int,
) -> None:
    chooses = random.Random(seed)
    # The first tokens are single bytes: most of what follows from them is no UTF-8.
    prompt = [chooses.randrange(256 if seed % 2 else 370) for _ in range(90)]
    service.script.tokens_per_step = 1 + seed % 3
    model = {"model": MODEL}
    full = same_both_ways(name, service.base_url, prompt, 120, **model)
    assert "\ufffd" in full
    for length in (1, 2, 4):
        at = chooses.randrange(len(full) // 2)
        stop = full[at : at + length]
        output = same_both_ways(name, service.base_url, prompt, 120, **model, stop=[stop])
        assert output == full.partition(stop)[0]


@pytest.fixture(scope="module")
def random_model(
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    with chat_service(redis_url, tmp_path_factory.mktemp("random"), (ENFORCED,)) as url:
        yield url


@pytest.mark.parametrize("name", DIALECTS)
def test_any_output_is_the_same_streamed_and_whole(random_model: str, name: str) -> None:
    model = {"model": ENFORCED}
    broken = 0
    for seed in range(3):
        chosen: dict[str, Any] = {"temperature": 1.5, "seed": seed, "ignore_eos": True}
        if name == "message":
            chosen = {"temperature": 0}  # this dialect has no seeds
        prompt = f"{TEXTS['emoji']}{seed}"
        full = same_both_ways(name, random_model, prompt, 80, **model, **chosen)
        broken += full.count("\ufffd")
        member = DIALECTS[name].stop
        if member is not None and len(full) > 10:
            stop = full[len(full) // 2 :][:2]
            stops = {member: [stop]}
            output = same_both_ways(name, random_model, prompt, 80, **model, **chosen, **stops)
            assert output == full.partition(stop)[0]
    assert broken
