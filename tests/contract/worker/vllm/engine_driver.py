"""Runs requests through ENGINE=vllm: a program for the interpreter that has vLLM.

    python engine_driver.py WORK RESULTS

Both are files of msgpack, as tests/support/vllm_runs.py has them. The path has the packages
`worker` and `shared` alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from shared.messages import SamplingParams
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.vllm.build import build_vllm_engine


def run(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds all, steps until all have ended; returns what each was answered."""
    answers = {
        request["id"]: {
            "token_ids": [],
            "logprobs": [],
            "finish_reason": None,
            "error": None,
            "message": "",
            "num_cached_tokens": 0,
        }
        for request in requests
    }
    for request in requests:
        engine.add(
            EngineRequest(
                request_id=request["id"],
                prompt_token_ids=tuple(request["prompt"]),
                params=msgspec.convert(request["params"], SamplingParams),
                output_token_ids=tuple(request["resumed"]),
                tenant=request["tenant"],
            )
        )
    while engine.has_unfinished():
        for output in engine.step():
            entry = answers[output.request_id]
            entry["token_ids"] += output.token_ids
            entry["logprobs"] += output.logprobs or ()
            entry["finish_reason"] = output.finish_reason
            entry["error"], entry["message"] = output.error, output.message
            entry["num_cached_tokens"] = output.num_cached_tokens
    return {"answers": answers, "preemptions": engine.stats().preemptions}


def main() -> None:
    work = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), strict=False)
    options = msgspec.convert(work["options"], EngineOptions)
    engine = build_vllm_engine(options, lambda stage, share: None).engine
    results = [run(engine, requests) for requests in work["runs"]]
    Path(sys.argv[2]).write_bytes(msgspec.msgpack.encode(results))


if __name__ == "__main__":
    main()
