"""The place where two prompts part has the right cause, in the templates of several models."""

from __future__ import annotations

import pytest

from api.jobs.prefix_place import place_of
from shared.transport.kept_prompts import common_tokens


class Characters:
    """A tokenizer whose ids are characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def ids(text: str) -> bytes:
    return b"".join(b"%d," % ord(char) for char in text)


CHATML = "<|im_start|>system\nYou help.{tools}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
ANSWER = CHATML.format(tools="") + "<|im_start|>assistant\n"
TOOLS = CHATML.replace("{tools}", '\n# Tools\n<tools>\n{{"name": "%s"}}\n</tools> by %s')
HARMONY = "<|start|>user<|message|>Hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("earlier", "now", "cause"),
    [
        ("Today is 2026-11-26.", "Today is 2026-11-27.", "date"),
        ("It is 10:59:59 now", "It is 11:00:00 now", "date"),
        ("Today: Thursday", "Today: Friday", "date"),
        ("On 26 Nov 2026, go", "On 27 Nov 2026, go", "date"),
        ("at 1795700000 s", "at 1795700001 s", "date"),
        (TOOLS % ("read", "me"), TOOLS % ("write", "me"), "tools"),
        (TOOLS % ("read", "me"), TOOLS % ("read", "us"), "system"),
        ("[AVAILABLE_TOOLS][{a}]", "[AVAILABLE_TOOLS][{b}]", "tools"),
        (CHATML, CHATML.replace("Hi", "Ho"), "message"),
        ("[INST]Hi[/INST]Yes", "[INST]Hi[/INST]No", "assistant"),
        (ANSWER + "<think>\nHm\n</think>\nYes", ANSWER + "Yes", "reasoning"),
        (ANSWER + "Yes  ", ANSWER + "Yes<|im_end|>", "assistant"),
        (
            HARMONY + "<|channel|>analysis<|message|>Hm",
            HARMONY + "<|channel|>final<|message|>Yes",
            "reasoning",
        ),
        (
            ANSWER + '<tool_call>{"id": "call_ab12"}',
            ANSWER + '<tool_call>{"id": "call_ab34"}',
            "call_id",
        ),
        ("[TOOL_CALLS]f[CALL_ID]a1b", "[TOOL_CALLS]f[CALL_ID]a2b", "call_id"),
    ],
)
def test_each_cause_is_recognised(earlier: str, now: str, cause: str) -> None:
    same = common_tokens(ids(now), ids(earlier))
    found, text, earlier_text = place_of(Characters(), ids(now), ids(earlier), same)  # type: ignore[arg-type]
    assert found == cause
    assert text != earlier_text
    assert len(text) <= 36


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("ab", "abc", 2), ("", "a", 0), ("ab", "ac", 1), ("abc", "abc", 3), ("\x01", "\x0a", 0)],
)
def test_whole_ids_are_counted(one: str, other: str, count: int) -> None:
    assert common_tokens(ids(one), ids(other)) == count


def test_the_same_text_in_other_tokens_is_told_apart() -> None:
    class Pairs(Characters):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "".join("ab" if each == 1 else chr(each) for each in token_ids)

    found, text, earlier_text = place_of(Pairs(), b"99,97,98,100,", b"99,1,100,", 1)  # type: ignore[arg-type]
    assert (found, text, earlier_text) == ("tokens", "cabd", "cabd")
