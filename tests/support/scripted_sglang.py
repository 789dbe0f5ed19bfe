"""A stand-in for an SGLang server, with the facts of its source that worker.engines.http knows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.scripted_upstream import Scripted, ScriptedUpstream


class ScriptedSglang(ScriptedUpstream):
    """Each event has all output ids so far, or with `is_incremental` the new ones. Two tokens of
    three share an event, as where its reader is slow."""

    is_incremental = False
    refusal = ""  # of a grammar that does not compile

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/server_info", self._server_info),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/generate", self._generate, methods=["POST"]),
        ]

    async def _server_info(self, request: Request) -> Response:
        info = {"version": "0.0-scripted", "context_length": None, "internal_states": [{}]}
        return self._refusal(request) or JSONResponse(info)

    def _read(self, body: dict[str, Any]) -> tuple[list[int], int]:
        return body["input_ids"], body["sampling_params"]["max_new_tokens"]

    async def _events(
        self, body: dict[str, Any], tokens: AsyncIterator[Scripted]
    ) -> AsyncIterator[str]:
        output: list[int] = []
        num_sent = 0
        if self.refusal:
            end = {"type": "abort", "message": self.refusal, "status_code": 400, "err_type": "x"}
            yield _event(self._answer(body, [], 0, end))
        else:
            async for token_id, reason in tokens:
                output.append(token_id)
                if reason is not None or len(output) % 3 != 1:
                    end = None if reason is None else {"type": reason, "message": "as told"}
                    yield _event(self._answer(body, output, num_sent, end))
                    num_sent = len(output)
        yield "data: [DONE]\n\n"

    def _answer(
        self, body: dict[str, Any], output: list[int], num_sent: int, end: dict[str, Any] | None
    ) -> dict[str, Any]:
        start = num_sent if self.is_incremental else 0
        meta: dict[str, Any] = {
            "id": "a",
            "finish_reason": end,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(output),
            "cached_tokens": self.num_cached,
        }
        if body.get("return_logprob"):
            entries = [[-0.5, token_id, None] for token_id in output[start:]]
            meta["output_token_logprobs"] = entries
            meta["output_token_logprobs_length"] = len(output)
            if body["top_logprobs_num"]:
                tops = [[entry, [-1.5, 7, None]] for entry in entries]
                meta["output_top_logprobs"] = tops
        return {"text": "", "output_ids": output[start:], "meta_info": meta}


def _event(answer: dict[str, Any]) -> str:
    return f"data: {json.dumps(answer)}\n\n"
