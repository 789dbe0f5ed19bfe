"""What HTTP, Redis and the processes between add to an idle service's time to the first token.

    python -m bench.added_latency --runs 200

Asks the same prompts of an engine in this process and of a whole service, both with the demo model,
one at a time and in turns, so that whatever else the machine does meets both. Prints one JSON line:
medians and 90th percentiles in milliseconds, and the difference of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from pathlib import Path

import aiohttp
import torch

from bench.load_client import completions
from bench.machine import cpu_name
from bench.workloads import Seen, Work, percentile
from shared.messages import SamplingParams
from tests.support.launched import REPOSITORY, Launched
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.model.build import build_model

MODEL = "penstock-demo"
CHECKPOINT = REPOSITORY / "worker" / "demo" / "checkpoint"
NUM_TOKENS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    arguments = parser.parse_args()
    built = build_model(EngineOptions(checkpoint=str(CHECKPOINT), num_threads=1))
    engine = Engine(built.engine_config, built.runner)
    env = {"LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryDirectory() as place,
        Launched(Path(place), env, is_forked=False) as penstock,
    ):
        row = asyncio.run(_measure(arguments, engine, penstock.base_url))
    facts = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps(facts | row))


async def _measure(
    arguments: argparse.Namespace, engine: Engine, base_url: str
) -> dict[str, object]:
    draw = random.Random(1)
    own: list[float] = []
    whole: list[float] = []
    async with aiohttp.ClientSession() as session:  # one kept connection, as an idle client has
        send = completions(session, base_url, MODEL)
        for run in range(arguments.runs + 5):
            prompt = tuple(draw.randrange(300, 2000) for _ in range(arguments.prompt_tokens))
            alone_ms = _engine_ttft_ms(engine, str(run), prompt)
            seen = Seen(len(prompt))
            await send(Work(prompt, NUM_TOKENS), seen)
            if run >= 5:  # the first ones warm up
                own.append(alone_ms)
                whole.append(seen.ttft_ms)
    return {
        "runs": arguments.runs,
        "prompt_tokens": arguments.prompt_tokens,
        "engine_ms": {"p50": round(percentile(own, 50), 2), "p90": round(percentile(own, 90), 2)},
        "service_ms": {
            "p50": round(percentile(whole, 50), 2),
            "p90": round(percentile(whole, 90), 2),
        },
        "added_p50_ms": round(percentile(whole, 50) - percentile(own, 50), 2),
    }


def _engine_ttft_ms(engine: Engine, request_id: str, prompt: tuple[int, ...]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    begin_s = time.perf_counter()
    engine.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
    first_ms = 0.0
    while engine.has_unfinished():
        outputs = engine.step()
        if outputs and not first_ms:
            first_ms = (time.perf_counter() - begin_s) * 1e3
    return first_ms


if __name__ == "__main__":
    main()
