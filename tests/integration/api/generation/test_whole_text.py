"""Streamed text is unstreamed text, byte for byte: any script, any tokens, with stops and without.

Two models: one repeats the tokens of its prompt, so that a test chooses what it says, broken UTF-8
included; one computes with random weights, and most of what it says is no text at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.api.chat_service import ENFORCED, chat_service
from tests.support.dialects import DIALECTS, Dialect
from tests.support.running_service import RunningService

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=str)
TIMEOUT_S = 60
TEXTS = {
    "emoji": "😀😃👍🏽🇳🇴🏳️‍🌈1️⃣🫠🧿",
    "families": "👨‍👩‍👧‍👦 👩🏽‍🚀 ❤️‍🔥 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "cjk": "漢字仮名交じり文、한국어 텍스트，繁體中文𠮷野家𓀀",
    "marks": "Z͑ͫ̓ͪ̂ͫ̽a̴̵̞l̠g̶o n̈ǹé e\u0301 \u1100\u1161\u11a8 ক্ষি नमस्ते",
    "directions": "שָׁלוֹם العَرَبِيَّة \u202eright\u202c \u200b\u200c\u200d\ufeff",
    "ends of lines": "a\r\nb\rc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ei\x00j",
}


def same_both_ways(
    dialect: Dialect, base_url: str, prompt: Any, num_tokens: int, **members: Any
) -> str:
    """The text, once it was seen to be the same whole and streamed."""
    with httpx.Client(base_url=base_url, timeout=TIMEOUT_S) as client:
        whole, streamed = (
            dialect.answer(client, prompt, stream=stream, max_tokens=num_tokens, **members).text
            for stream in (False, True)
        )
    assert streamed.encode() == whole.encode()
    return whole


@pytest.mark.promise(
    "Clients: streamed text equals unstreamed text, byte for byte, also with invalid bytes"
)
@pytest.mark.parametrize("kind", TEXTS)
@every_dialect
def test_text_of_any_script_comes_whole(
    service: RunningService, dialect: Dialect, kind: str
) -> None:
    text = TEXTS[kind]
    for tokens_per_step, num_tokens in ((1, 150), (5, 150), (1, 31)):  # 31: within a character
        service.script.tokens_per_step = tokens_per_step
        output = same_both_ways(dialect, service.base_url, text, num_tokens)
        assert "\ufffd" not in output[:-1]
        if num_tokens == 150:
            assert text[:20] in output


@pytest.mark.parametrize("kind", TEXTS)
@every_dialect
def test_a_stop_of_any_script_cuts_both_at_one_place(
    service: RunningService, dialect: Dialect, kind: str
) -> None:
    full = same_both_ways(dialect, service.base_url, TEXTS[kind], 60)
    chooses = random.Random(kind)
    for tokens_per_step in (1, 4):
        service.script.tokens_per_step = tokens_per_step
        for length in (1, 2, 5):
            at = chooses.randrange(len(full) // 3, len(full) - length)
            stop = full[at : at + length]
            stops = [stop, stop + "never", "never"]
            output = same_both_ways(dialect, service.base_url, TEXTS[kind], 60, stop=stops)
            assert output == full.partition(stop)[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["completions", "generate"])
def test_tokens_that_are_no_text_come_out_the_same(
    service: RunningService,
    name: str,
    seed: int,
) -> None:
    dialect, chooses = DIALECTS[name], random.Random(seed)
    # The first tokens are single bytes: most of what follows from them is no UTF-8.
    prompt = [chooses.randrange(256 if seed % 2 else 370) for _ in range(90)]
    service.script.tokens_per_step = 1 + seed % 3
    full = same_both_ways(dialect, service.base_url, prompt, 120)
    assert "\ufffd" in full
    for length in (1, 2, 4):
        at = chooses.randrange(len(full) // 2)
        stop = full[at : at + length]
        output = same_both_ways(dialect, service.base_url, prompt, 120, stop=[stop])
        assert output == full.partition(stop)[0]


@pytest.fixture(scope="module")
def random_model(
    redis_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    with chat_service(redis_url, tmp_path_factory.mktemp("random"), (ENFORCED,)) as url:
        yield url


@every_dialect
def test_any_output_is_the_same_streamed_and_whole(random_model: str, dialect: Dialect) -> None:
    broken = 0
    for seed in range(3):
        chosen: dict[str, Any] = {"temperature": 1.5, "seed": seed, "ignore_eos": True}
        if dialect.name == "messages":
            chosen = {"temperature": 0}  # this dialect has no seeds
        chosen["model"] = ENFORCED
        prompt = f"{TEXTS['emoji']}{seed}"
        full = same_both_ways(dialect, random_model, prompt, 80, **chosen)
        broken += full.count("\ufffd")
        if len(full) > 10:
            stop = full[len(full) // 2 :][:2]
            output = same_both_ways(dialect, random_model, prompt, 80, **chosen, stop=[stop])
            assert output == full.partition(stop)[0]
    assert broken
