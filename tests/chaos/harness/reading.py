"""Reading: all that one client has seen of one answer, over as many connections as it took."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from shared.messages import START, Cursor

# The end of a stream, not of its job: another frontend goes on.
INTERRUPTIONS = frozenset({"frontend_draining", "service_unavailable"})


class Reading:
    """Fed with the lines of event streams, in order; keeps what a client would keep."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.job_id = ""
        self.status = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.cursors: list[Cursor] = []
        self.ends: list[dict[str, Any]] = []  # terminal events of the job
        self.interruptions: list[str] = []  # codes of streams that ended before the job
        self.num_keepalives = 0
        self.num_connections = 0
        self.refusal: dict[str, Any] | None = None  # an error answer instead of a stream
        self.refusals: Counter[str] = Counter()  # all of them, by status and code
        self.longest_wait_s = 0.0  # without a token, from the first one on
        self._token_came_s: float | None = None
        self._event_id: str | None = None

    @property
    def cursor(self) -> Cursor:
        """Where a resuming client goes on."""
        return self.cursors[-1] if self.cursors else START

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        return bool(self.ends)

    @property
    def finished(self) -> bool:
        return bool(self.ends) and self.ends[0].get("done") is True

    @property
    def error_code(self) -> str | None:
        if not self.ends or "error" not in self.ends[0]:
            return None
        code = self.ends[0]["error"]["code"]
        assert isinstance(code, str)
        return code

    def take_line(self, line: str) -> bool:
        """False when the stream says that it is over."""
        if line.startswith(":"):
            self.num_keepalives += 1
        elif line.startswith("id: "):
            self._event_id = line[4:]
        elif line == "data: [DONE]":
            return False
        elif line.startswith("data: "):
            self._take_event(json.loads(line[6:]))
            self._event_id = None
        return True

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event and event["error"]["code"] in INTERRUPTIONS:
            self.interruptions.append(event["error"]["code"])
            return
        assert not self.ends, f"{event} came after the end"
        self.job_id = event.get("id", self.job_id).removeprefix("gen-")
        now_s = time.monotonic()
        if self._token_came_s is not None:
            self.longest_wait_s = max(self.longest_wait_s, now_s - self._token_came_s)
        self._token_came_s = now_s
        self.text += event["text"]
        self.token_ids += event["token_ids"]
        if event.get("done") or "error" in event:
            self.ends.append(event)
            return
        cursor = Cursor(len(self.token_ids), len(self.text.encode()))
        if self._event_id is not None:
            assert self._event_id == str(cursor), "an event's id is the position after it"
        self.cursors.append(cursor)
