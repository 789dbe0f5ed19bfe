"""What engines do with plans of requests; as a program, what vLLM does with one.

    python engine_checks.py PLAN RESULTS

runs in vLLM's interpreter, whose path has `worker` and `shared` alone. Both are files of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.messages import Grammar, GrammarKind, SamplingParams
from worker.engine.errors import EngineFailed, RequestRefused
from worker.engine.interface import EngineInterface
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.vllm.build import build_vllm_engine

if TYPE_CHECKING:
    from worker.engines.vllm.engine import VllmEngine

Requests = dict[str, dict[str, Any]]


def request_of(name: str, prompt: list[int], **members: Any) -> EngineRequest:
    of_request = {
        key: members.pop(key)
        for key in ("output_token_ids", "tenant", "scores_prompt", "priority")
        if key in members
    }
    if "output_token_ids" in of_request:
        of_request["output_token_ids"] = tuple(of_request["output_token_ids"])
    if "stop_token_ids" in members:
        members["stop_token_ids"] = tuple(members["stop_token_ids"])
    if "logit_bias" in members:
        members["logit_bias"] = {int(k): v for k, v in members["logit_bias"].items()}
    if "grammar" in members:
        kind, text = members["grammar"]
        members["grammar"] = Grammar(GrammarKind(kind), text)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**members),
        **of_request,
    )


def run(engine: EngineInterface, requests: Requests) -> dict[str, Any]:
    """Runs the requests together; returns of each its tokens, end, and what else it had."""
    found: dict[str, Any] = {}
    for name, members in requests.items():
        found[name] = {
            "tokens": [],
            "sizes": [],
            "logprobs": [],
            "scores": [],
            "end": None,
            "stop": None,
            "cached": 0,
            "error": None,
        }
        try:
            engine.add(request_of(name, **members))
        except RequestRefused as refused:
            found[name]["error"] = [refused.code, refused.message]
    while engine.has_unfinished():
        for output in engine.step():
            this = found[output.request_id]
            assert this["end"] is None, "nothing comes after the end"
            this["tokens"] += output.token_ids
            this["sizes"].append(len(output.token_ids))
            this["logprobs"] += output.logprobs or ()
            this["scores"] += output.prompt_logprobs
            this["cached"] = max(this["cached"], output.num_cached_tokens)
            if output.finish_reason is not None:
                this["end"], this["stop"] = output.finish_reason, output.stop_reason
                if output.error is not None:
                    this["error"] = [output.error, output.message]
    return found


def cancelled(engine: VllmEngine, prompt: list[int]) -> dict[str, Any]:
    """Cancels one of two long requests after some steps, then the other."""
    before = engine.stats()
    for name in ("one", "two"):
        engine.add(request_of(name, prompt, max_tokens=200, temperature=0.0, ignore_eos=True))
    for _ in range(4):
        engine.step()
    both = engine.stats()
    assert engine.cancel("one")
    assert not engine.cancel("one"), "it is gone"
    names = {output.request_id for output in engine.step()}
    alone = engine.stats()
    engine.cancel("two")
    is_idle = not engine.has_unfinished()
    after = engine.stats()
    stats = [dataclasses.asdict(each) for each in (before, both, alone, after)]
    return {"stats": stats, "names": sorted(names), "is_idle": is_idle}


def timed(engine: VllmEngine) -> list[float] | None:
    """Returns the seconds that the last output of a request tells; earlier ones tell none."""
    engine.add(request_of("timed", [1, 2, 3, 4], max_tokens=8, temperature=0.0))
    times = None
    while engine.has_unfinished():
        for output in engine.step():
            assert (output.times is None) is (output.finish_reason is None)
            times = output.times
    return None if times is None else list(times)


def failing(engine: VllmEngine, prompt: list[int]) -> list[str]:
    """Returns what becomes of a step that raises: as a fault of the step, and of the device."""
    step: Callable[[], Any] = engine._llm.step
    ends = []
    for error in (RuntimeError("a bug"), RuntimeError("CUDA error: out of memory")):

        def raising(error: Exception = error) -> Any:
            raise error

        engine._llm.step = raising
        engine.add(request_of("r", prompt, max_tokens=2, temperature=0.0))
        try:
            engine.step()
        except EngineFailed as failed:
            ends.append(f"EngineFailed {failed}")
        except Exception as other:
            ends.append(f"{type(other).__name__} {other}")
        finally:
            engine._llm.step = step
            engine.cancel("r")
    return ends


def num_graphs() -> int:
    """Returns how many graphs torch.compile has compiled in this process."""
    # Here and not above: vLLM sets torch's environment before it imports it.
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    stages: list[tuple[str, float]] = []
    prefixes: dict[str, list[tuple[str, bool]]] = {}
    built = build_vllm_engine(
        EngineOptions(**plan["options"]),
        lambda stage, share: stages.append((stage, share)),
        lambda sentence: None,
    )
    engine: Any = built.engine
    engine.self_test()
    results: dict[str, Any] = {
        "ready": {
            "config": dataclasses.asdict(built.config)
            | {"eos_token_ids": sorted(built.config.eos_token_ids)},
            "vocab_size": built.vocab_size,
            "num_parameters": built.num_parameters,
            "dtype": built.dtype,
            "version": built.version,
            "exact_resume": built.exact_resume,
        },
        "stages": stages,
        "graphs": [num_graphs()],  # compiled before the first request, and after the runs
        "runs": {},
        "prefixes": prefixes,  # what each run changed
    }
    for name, requests in plan["runs"].items():
        results["runs"][name] = run(engine, requests)
        changes = engine.measures.drain_prefixes()
        prefixes[name] = [(digest.hex(), is_held) for digest, is_held in changes]
    results["mask_s"] = engine.measures.drain_masks()
    results["graphs"].append(num_graphs())
    if "cancel" in plan:
        results["cancel"] = cancelled(engine, plan["cancel"])
        results["failing"] = failing(engine, plan["cancel"])
    results["stats"] = dataclasses.asdict(engine.stats())
    results["measures"] = engine.measures.counts()
    results["times"] = timed(engine)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
