"""Turns of agents over /v1/responses, as they are stored: what `redis_memory --agents` submits.

An agent has instructions of 10 KB and tools of 8 KB, of its own, and a conversation. In each turn
the model calls a tool, whose output it gets with the next one: 2 KB in three items. Its client
sends the whole conversation each time (`whole`), or what is new with `previous_response_id`
(`previous`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from api.dialects.responses.items import input_items
from api.dialects.responses.protocol import ResponseRequest
from api.dialects.responses.record import (
    StoredRequest,
    decode_request,
    encode_request,
    stored_request,
)
from api.output_parsers.parser import ParserConfig
from shared.keys import new_job_id
from shared.messages import Job, OnDisconnect, SamplingParams
from shared.text.model_card import ModelCard
from shared.transport.connect import RedisTransport

MODEL = "qwen3"
RETAIN_MS = 3_600_000
NUM_TOOLS = 12
TURN_BYTES = 2100
CARD = ModelCard(
    name=MODEL,
    created_s=1,
    max_model_len=131_072,
    vocab_size=150_000,
    eos_token_ids=(0,),
    has_chat_template=True,
    tokenizer_digest="t" * 64,
    facts_digest="f" * 64,
)


class Agent:
    """`earlier`: the jobs that its next turn continues, of `previous`."""

    def __init__(self, rng: random.Random, arguments: argparse.Namespace) -> None:
        self.earlier: list[str] = []
        self._rng = rng
        self._arguments = arguments
        self._instructions = self._text(10_000)
        self._tools = [self._tool(f"tool_{number}") for number in range(NUM_TOOLS)]
        self._items: list[dict[str, Any]] = [self._message("user", 1000)]
        while self._stored_bytes() < arguments.context - arguments.turns * TURN_BYTES / 2:
            self._add()
        self._num_sent = 0
        self._last: StoredRequest | None = None
        self.last_job_id = ""

    def next_job(self) -> Job:
        job_id = new_job_id()
        is_whole = self._arguments.style == "whole"
        items = self._items if is_whole else self._items[self._num_sent :]
        previous = None if is_whole or not self.earlier else f"resp_{self.earlier[-1]}"
        request = ResponseRequest.model_validate(
            {
                "model": MODEL,
                "instructions": self._instructions,
                "tools": self._tools,
                "input": items,
                "previous_response_id": previous,
            }
        )
        sampling = SamplingParams(max_tokens=self._arguments.tokens, seed=7)
        kept = input_items(request.input, job_id)
        stored = stored_request(request, CARD, ParserConfig(), kept, int(time.time()), sampling)
        record = encode_request(stored, job_id)
        self._last, self.last_job_id = stored, job_id
        self._num_sent = len(self._items)
        self._add()
        if not is_whole:
            self.earlier.append(job_id)
        return Job(
            job_id=job_id,
            model=MODEL,
            prompt_token_ids=tuple(range(100)),  # kept prompts have a bound of their own
            sampling=sampling,
            kind="response",
            timeout_ms=600_000,
            on_disconnect=OnDisconnect.CONTINUE,
            request_record=record.replace("\n", "") if self._arguments.unshared else record,
            retain_ms=RETAIN_MS,
        )

    async def check(self, transport: RedisTransport) -> None:
        """Checks that the last request is read as it was made."""
        assert self._last is not None
        record = await transport.store.request_record(self.last_job_id)
        assert record is not None
        assert decode_request(record, self.last_job_id) == self._last

    def _stored_bytes(self) -> int:
        return sum(map(len, map(json.dumps, (self._instructions, self._tools, self._items))))

    def _add(self) -> None:
        call_id = f"call_{self._rng.randbytes(12).hex()}"
        call = {"type": "function_call", "call_id": call_id, "name": "tool_1"}
        self._items += [
            self._message("assistant", 300),
            {**call, "arguments": f'{{"command": "{self._text(200)}"}}'},
            {"type": "function_call_output", "call_id": call_id, "output": self._text(1200)},
        ]

    def _message(self, role: str, num_bytes: int) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": self._text(num_bytes)}

    def _tool(self, name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"command": {"type": "string"}}}
        tool = {"type": "function", "name": name, "parameters": schema}
        return {**tool, "description": self._text(500)}

    def _text(self, num_bytes: int) -> str:
        return self._rng.randbytes(num_bytes * 3 // 4).hex(" ", 4)[:num_bytes]
