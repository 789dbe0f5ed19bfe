"""Decode and prefill steps: native, transformers' modules under our engine, and transformers alone.

    python -m tests.bench.transformers_steps --shape qwen3-0.6b
    python -m tests.bench.transformers_steps --shape olmoe-1b-7b-4-layers --ways engine generate

`native` and `engine` are our runner's steps (`MODEL_IMPL=native` and `transformers`), `generate`
is a forward pass of the model over transformers' own cache, as `generate` calls it. All are in one
process and take turns, so that a busy neighbour meets all of them; each line has medians and the
shortest times in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from shared.cores import available_cores
from tests.bench.forward_steps import BLOCK_SIZE, COMMON, decode, prefill
from tests.bench.machine import cpu_name
from tests.bench.shapes import SHAPES
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions, ModelImpl
from worker.model.build import build_model

Step = Callable[[], object]
WAYS = ("native", "engine", "generate")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prefill", nargs="*", type=int, default=[512])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=6.0, help="at least, for each figure")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.shape] | COMMON
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        ways = {way: _MAKERS[way](args, directory) for way in args.ways}
        common = {"shape": args.shape, "cpu": cpu_name(), "threads": args.threads}
        for size in args.batch:
            steps = {way: made.decode(size) for way, made in ways.items()}
            report(common | {"step": "decode", "batch": size}, steps, ways, args.seconds)
        for length in args.prefill:
            steps = {way: made.prefill(length) for way, made in ways.items()}
            report(common | {"step": "prefill", "tokens": length}, steps, ways, args.seconds)
    return 0


class OwnSteps:
    """Steps of our runner."""

    def __init__(self, args: argparse.Namespace, directory: str, implementation: ModelImpl) -> None:
        self._context = args.context
        self._width = -(-(args.context + 1) // BLOCK_SIZE)
        most = max([*args.batch, 1])
        self._runner = build_model(
            EngineOptions(
                checkpoint=directory,
                load_format="dummy",
                device="cpu",
                model_impl=implementation,
                block_size=BLOCK_SIZE,
                num_kv_blocks=max(self._width * most, max([*args.prefill, 1]) // BLOCK_SIZE + 1),
                num_threads=args.threads,
            )
        ).runner
        self.torch_threads = torch.get_num_threads()
        for i in range(most):
            fill = prefill(args.context, seq_id=i, first_block=i * self._width)
            self._runner.launch(ScheduledBatch((fill,))).collect()

    def decode(self, size: int) -> Step:
        rows = tuple(decode(i, self._context, self._width) for i in range(size))
        return lambda: self._runner.launch(ScheduledBatch(rows)).collect()

    def prefill(self, length: int) -> Step:
        batch = ScheduledBatch((prefill(length),))
        return lambda: self._runner.launch(batch).collect()


class GenerateSteps:
    """Forward passes of the model with transformers' cache and its choice of attention."""

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._context = args.context
        self.torch_threads = args.threads
        torch.set_num_threads(args.threads)
        config = AutoConfig.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def decode(self, size: int) -> Step:
        cache = DynamicCache(config=self._model.config)
        known = torch.arange(self._context)[None].expand(size, -1)
        self._forward(known, cache)
        token = torch.full((size, 1), 5)

        def step() -> object:
            out = self._forward(token, cache)
            cache.crop(-1)  # the token that this step has added
            return out

        return step

    def prefill(self, length: int) -> Step:
        tokens = torch.arange(length)[None] % 1000
        return lambda: self._forward(tokens, DynamicCache(config=self._model.config))

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> list[int]:
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
        return ids


_MAKERS: dict[str, Callable[[argparse.Namespace, str], Any]] = {
    "native": lambda args, directory: OwnSteps(args, directory, "native"),
    "engine": lambda args, directory: OwnSteps(args, directory, "transformers"),
    "generate": GenerateSteps,
}


def report(
    line: dict[str, object], steps: dict[str, Step], ways: dict[str, Any], seconds: float
) -> None:
    """Prints the median and the shortest time of each way's steps, in turns of three."""
    times: dict[str, list[float]] = {way: [] for way in steps}
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < seconds * len(steps) or len(times[min(times)]) < 3:
        for way, step in steps.items():
            torch.set_num_threads(ways[way].torch_threads)
            for _ in range(3):
                start_s = time.perf_counter()
                step()
                times[way].append(time.perf_counter() - start_s)
    for way, values in times.items():
        values.sort()
        line[f"{way}_ms"] = round(values[len(values) // 2] * 1e3, 2)
        line[f"{way}_best_ms"] = round(values[0] * 1e3, 2)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
