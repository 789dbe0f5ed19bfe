"""The place where a prompt parts from an earlier one: both texts, and the likely cause."""

from __future__ import annotations

import re
from typing import Literal

from shared.text.base import Tokenizer

SHOWN_BEFORE, SHOWN_AFTER = 12, 24  # tokens around the first different one
LOOKED_BACK = 32_768  # tokens in which the begin of its turn is searched

Cause = Literal[
    "cached",
    "not_cached",
    "date",
    "tools",
    "system",
    "reasoning",
    "call_id",
    "tokens",
    "assistant",
    "message",
    "changed",
    "no_earlier_job",
    "not_kept",
    "not_ended",
]
_TURN = re.compile(
    r"<\|(?:im_start|start_header_id|header_start|start|turn)\|?>\s*(\w+)|<start_of_turn>(\w+)"
    r"|\[(SYSTEM_PROMPT|AVAILABLE_TOOLS|INST|/INST|TOOL_CALLS|TOOL_RESULTS)\]"
)
_ROLES = {"/INST": "assistant", "TOOL_CALLS": "assistant", "model": "assistant"}
_SYSTEM = ("system", "developer", "SYSTEM_PROMPT", "AVAILABLE_TOOLS")
_TOOLS = re.compile(r'<tools>|# Tools|AVAILABLE_TOOLS|namespace functions|"parameters":')
_TOOLS_END = re.compile(r"</tools>|\[/AVAILABLE_TOOLS\]|} // namespace functions")
_REASONING = re.compile(r"<think>|\[THINK\]|<\|channel\|>analysis")
_CALL_ID = re.compile(r'(?:call_|toolu_|"(?:tool_call_)?id": ?"|\[CALL_ID\])[\w-]*$')
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ][\d:.]+)?|\d{1,2}:\d\d(?::\d\d)?|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    rf"|\b\d{{1,2}} {_MONTH} \d{{4}}|\b{_MONTH} \d{{1,2}},? \d{{4}}|\b1[6-9]\d{{8}}\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)


def place_of(
    tokenizer: Tokenizer, tokens: bytes, earlier: bytes, same: int
) -> tuple[Cause, str, str]:
    """Returns the likely cause, and both texts around the first different token: of the prompt, and
    of the earlier one. `tokens`, `earlier`: as KeptPrompts has them. For a thread."""
    ours, theirs = _ids(tokens, same), _ids(earlier, same)
    num_before = min(same, LOOKED_BACK)
    before = tokenizer.decode(ours[:num_before], skip_special_tokens=False)
    shown = tokenizer.decode(
        ours[max(0, num_before - SHOWN_BEFORE) : num_before], skip_special_tokens=False
    )
    after = tokenizer.decode(ours[num_before:], skip_special_tokens=False)
    earlier_after = tokenizer.decode(theirs[num_before:], skip_special_tokens=False)
    return _cause(before, after, earlier_after), shown + after, shown + earlier_after


def _ids(tokens: bytes, same: int) -> list[int]:
    """Returns the ids from LOOKED_BACK tokens before a place to SHOWN_AFTER after it."""
    ids = tokens.rstrip(b",").split(b",")
    return [int(token_id) for token_id in ids[max(0, same - LOOKED_BACK) : same + SHOWN_AFTER]]


def _cause(before: str, after: str, earlier_after: str) -> Cause:
    begin, num_both = before[-40:], min(len(after), len(earlier_after))
    if after[:num_both] == earlier_after[:num_both] != "":
        return "tokens"
    if _dates(begin, after) != _dates(begin, earlier_after):
        return "date"
    if _CALL_ID.search(begin):
        return "call_id"
    role, turn = "", before
    for match in _TURN.finditer(before):
        role, turn = match[1] or match[2] or match[3], before[match.start() :]
    role = _ROLES.get(role, role)
    if role in _SYSTEM or not role:
        tools = [match.end() for match in _TOOLS.finditer(turn)]
        ends = [match.end() for match in _TOOLS_END.finditer(turn)]
        return "tools" if tools and (not ends or ends[-1] < tools[-1]) else "system"
    if role != "assistant":
        return "message"
    if _REASONING.search(turn[-40:] + earlier_after) and not _REASONING.search(after):
        return "reasoning"
    return "assistant"


def _dates(before: str, after: str) -> str | None:
    """Returns the first date or time that begins before the different text, or with it."""
    for match in _DATE.finditer(before + after):
        if match.end() > len(before):
            return match[0] if match.start() <= len(before) else None
    return None
