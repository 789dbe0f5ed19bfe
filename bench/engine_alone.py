"""W1 and W4 on an engine in this process: what the workloads take without HTTP, Redis and clients.

    python -m bench.engine_alone --quantization none int8 --step-target-ms 0 180 --runs 3

Random weights of a known shape, steps paced by the real clock where there is a target. Prints one
JSON line for each run: of W1 output tokens a second and the gaps between a stream's tokens, of W4
the worst gap of the streams and the long prompt's time to its first token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.forward_steps import COMMON
from bench.machine import busy_s, cpu_name
from bench.shapes import SHAPES
from bench.workloads import percentile
from shared.cores import available_cores
from shared.messages import SamplingParams
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model

LONG = "long"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--step-target-ms", nargs="+", type=int, default=[180], help="0: none")
    parser.add_argument("--batched-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--runs", type=int, default=1)
    arguments = parser.parse_args()
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "shape": arguments.shape}
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[arguments.shape] | COMMON
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for quantization in arguments.quantization:
            for target_ms in arguments.step_target_ms:
                built = build_model(
                    EngineOptions(
                        checkpoint=directory,
                        load_format="dummy",
                        device="cpu",
                        num_threads=arguments.threads,
                        quantization=quantization,
                        max_num_seqs=64,
                        max_num_batched_tokens=arguments.batched_tokens,
                        max_model_len=4096,
                        step_target_ms=target_ms,
                    )
                )
                case = facts | {"quantization": quantization, "step_target_ms": target_ms}
                for run in range(arguments.runs):
                    for workload in (_w1, _w4):
                        _show(case | {"run": run}, workload, _Requests(built, run))


class _Requests:
    """An engine's requests by name, and when their tokens came."""

    def __init__(self, built: BuiltModel, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_tokens = 0
        self.times: dict[str, list[float]] = {}
        self._vocab_size = built.runner.vocab_size
        self._engine = Engine(built.engine_config, built.runner, time.perf_counter)

    @property
    def are_running(self) -> bool:
        return self._engine.has_unfinished()

    def add(self, name: str, num_prompt: int, num_out: int) -> None:
        ids = tuple(self.random.randrange(1000, self._vocab_size) for _ in range(num_prompt))
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        self._engine.add(EngineRequest(request_id=name, prompt_token_ids=ids, params=params))
        self.times[name] = []

    def step(self) -> None:
        for output in self._engine.step():
            self.num_tokens += len(output.token_ids)
            self.times[output.request_id].append(time.perf_counter())


def _w1(requests: _Requests) -> dict[str, Any]:
    draw = requests.random
    for i in range(32):
        requests.add(str(i), draw.randint(100, 512), draw.randint(64, 192))
    begin_s = time.perf_counter()
    while requests.are_running:
        requests.step()
    wall_s = time.perf_counter() - begin_s
    gaps = [gap for times in requests.times.values() for gap in _gaps_ms(times)]
    return {
        "workload": "w1",
        "out_tok_s": requests.num_tokens / wall_s,
        "ttft_p50_ms": percentile([t[0] - begin_s for t in requests.times.values()], 50) * 1e3,
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p99_ms": percentile(gaps, 99),
    }


def _w4(requests: _Requests) -> dict[str, Any]:
    for i in range(4):
        requests.add(str(i), 64, 192)
    while min(map(len, requests.times.values())) < 24:
        requests.step()
    streams = list(requests.times.values())
    already = [len(times) for times in streams]
    requests.add(LONG, 1500, 16)
    begin_s = time.perf_counter()
    while not requests.times[LONG]:
        requests.step()
    during = [
        gap
        for times, count in zip(streams, already, strict=True)
        for gap in _gaps_ms(times[count - 1 :])
    ]
    row = {
        "workload": "w4",
        "stall_max_ms": max(during),
        "long_ttft_ms": (requests.times[LONG][0] - begin_s) * 1e3,
    }
    while requests.are_running:
        requests.step()
    return row


def _gaps_ms(times: list[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def _show(facts: dict[str, Any], workload: Any, requests: _Requests) -> None:
    all_before, own_before, begin_s = busy_s(), time.process_time(), time.perf_counter()
    row = workload(requests)
    others_s = busy_s() - all_before - (time.process_time() - own_before)
    row["foreign"] = max(0.0, others_s / (time.perf_counter() - begin_s))
    numbers = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
    sys.stdout.write(json.dumps(facts | numbers) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
