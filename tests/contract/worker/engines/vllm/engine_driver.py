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
from worker.engines.vllm.build import build_vllm_engine


def run(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds each at its step, steps until all have ended; returns what each was answered."""
    answers = {
        request["id"]: {
            "token_ids": [],
            "logprobs": [],
            "prompt_logprobs": [],
            "finish_reason": None,
            "error": None,
            "message": "",
            "num_cached_tokens": 0,
            "first_step": None,
            "last_step": None,
        }
        for request in requests
    }
    before = engine.stats()
    step = 0
    while step <= max(request["step"] for request in requests) or engine.has_unfinished():
        for request in requests:
            if request["step"] == step:
                engine.add(_engine_request(request))
            if request["cancelled"] == step:
                assert engine.cancel(request["id"])
        for output in engine.step():
            entry = answers[output.request_id]
            if entry["first_step"] is None:
                entry["first_step"] = step
            entry["last_step"] = step
            entry["token_ids"] += output.token_ids
            entry["prompt_logprobs"] += output.prompt_logprobs
            entry["logprobs"] += output.logprobs or ()
            entry["finish_reason"] = output.finish_reason
            entry["error"], entry["message"] = output.error, output.message
            entry["num_cached_tokens"] = output.num_cached_tokens
        step += 1
    after = engine.stats()
    return {
        "answers": answers,
        "preemptions": after.preemptions,
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
        "generated_tokens": after.generated_tokens - before.generated_tokens,
    }


def _engine_request(request: dict[str, Any]) -> EngineRequest:
    return EngineRequest(
        request_id=request["id"],
        prompt_token_ids=tuple(request["prompt"]),
        params=msgspec.convert(request["params"], SamplingParams),
        output_token_ids=tuple(request["resumed"]),
        tenant=request["tenant"],
        job_id=request["job_id"],
        priority=request["priority"],
        adapter=request["adapter"],
    )


def make_late(llm: Any) -> None:
    """Lets a step give what the step before it computed, as async scheduling does on a GPU."""
    from vllm.v1.engine import EngineCoreOutputs  # once the environment is set

    get_output, late = llm.engine_core.get_output, EngineCoreOutputs()

    def get_late_output() -> EngineCoreOutputs:
        nonlocal late
        output, late = late, get_output()
        return output

    llm.engine_core.get_output = get_late_output


def main() -> None:
    work = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), strict=False)
    options = msgspec.convert(work["options"], EngineOptions)
    engine: Any = build_vllm_engine(
        options, lambda stage, share: None, lambda sentence: None
    ).engine
    if work["is_late"]:
        make_late(engine._llm)
    results = [run(engine, requests) for requests in work["runs"]]
    Path(sys.argv[2]).write_bytes(msgspec.msgpack.encode(results))


if __name__ == "__main__":
    main()
