"""Decode and prefill steps: native, transformers' modules under our engine, and transformers alone.

    python -m bench.transformers_steps --shape qwen3-0.6b
    python -m bench.transformers_steps --shape olmoe-1b-7b-4-layers --ways engine generate
    python -m bench.transformers_steps --device cuda --ways native continuous_batching
    python -m bench.transformers_steps --prefill 128 --prompts 1 8 --neighbours 1
    python -m bench.transformers_steps --device cuda --shape qwen3-moe-48-layers --batch 1 32 \\
        --prefill 512 --ways engine launched --seconds 1

`native` and `engine` are our runner's steps (`MODEL_IMPL=native` and `transformers`), `launched`
the same as `engine` without CUDA graphs, `generate`
is a forward pass of the model over transformers' own cache, as `generate` calls it.
`continuous_batching` is transformers' `ContinuousBatchingManager`: of requests whose prompts are in
its prefix cache the times between tokens, as it records them, and of new prompts the time from
submission to the last one's first token. Both have processes of their own, as torch's threads of
one process wait otherwise where there are more of them than cores. All take turns, so that a busy
neighbour meets all of them. Lines have medians and the shortest times in milliseconds, tokens per
second by the median, and `foreign`, the cores that other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from bench.forward_steps import BLOCK_SIZE, COMMON, decodes_of, prefill
from bench.machine import busy_process, busy_s, cpu_name
from bench.shapes import SHAPES
from shared.cores import available_cores
from worker.engine.batch import ScheduledBatch
from worker.engine_options import EngineOptions, ModelImpl
from worker.model.build import build_model

Step = Callable[[], object]
Turn = Callable[[], list[float]]  # the seconds of a few steps
STEPS_OF_A_TURN = 3
MAX_BATCHED_TOKENS = 2048  # our default
TIMEOUT_S = 600.0  # for one request of continuous batching
WAYS = ("native", "engine", "launched", "generate", "continuous_batching")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    defaults = [way for way in WAYS if way != "launched"]
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=defaults)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prefill", nargs="*", type=int, default=[512])
    parser.add_argument("--prompts", nargs="*", type=int, default=[1], help="computed at once")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=6.0, help="at least, for each figure")
    parser.add_argument("--neighbours", type=int, default=0, help="processes that loop meanwhile")
    parser.add_argument("--page-size", type=int, default=BLOCK_SIZE, help="of continuous batching")
    parser.add_argument("--attention", default="sdpa", help="of continuous batching")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        config = SHAPES[args.shape] | COMMON
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        ways: dict[str, Any] = {}
        for way in args.ways:
            ways[way] = _MAKERS[way](args, directory)
            stack.callback(ways[way].close)
        for _ in range(args.neighbours):
            stack.enter_context(busy_process())
        common = {
            "shape": args.shape,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
            "torch": torch.__version__,
            "threads": args.threads,
            "neighbours": args.neighbours,
        }
        for size in args.batch:
            turns = {way: made.decode(size) for way, made in ways.items()}
            line = common | {"step": "decode", "batch": size, "tokens": size, "prompts": 1}
            report(line, turns, ways, args.seconds)
        for length, count in itertools.product(args.prefill, args.prompts):
            turns = {way: made.prefill(length, count) for way, made in ways.items()}
            line = common | {"step": "prefill", "tokens": length, "prompts": count}
            report(line, turns, ways, args.seconds)
    return 0


def timed(step: Step, count: int = STEPS_OF_A_TURN) -> list[float]:
    """Returns the seconds of so many steps."""
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return times


class OwnSteps:
    """Steps of our runner."""

    def __init__(
        self,
        args: argparse.Namespace,
        directory: str,
        implementation: ModelImpl,
        *,
        cuda_graphs: bool = True,
    ) -> None:
        self._context = args.context
        self._width = -(-(args.context + 1) // BLOCK_SIZE)
        most = max([*args.batch, 1])
        longest = -(-max([*args.prefill, 1]) // BLOCK_SIZE) * max([*args.prompts, 1])
        self._built = build_model(
            EngineOptions(
                checkpoint=directory,
                load_format="dummy",
                device=args.device,
                model_impl=implementation,
                cuda_graphs=cuda_graphs,
                block_size=BLOCK_SIZE,
                num_kv_blocks=max(self._width * most, longest),
                max_num_seqs=most,
                num_threads=args.threads,
            )
        )
        self._runner = self._built.runner
        self.close = self._built.close
        self._num_groups = num = len(self._built.engine_config.windows)
        for i in range(most):
            first = i * num * self._width
            fill = prefill(args.context, seq_id=i, first_block=first, num_groups=num)
            self._runner.launch(ScheduledBatch((fill,))).collect()

    def decode(self, size: int) -> Turn:
        rows = tuple(decodes_of([self._context] * size, self._num_groups))
        return lambda: timed(lambda: self._runner.launch(ScheduledBatch(rows)).collect())

    def prefill(self, length: int, count: int) -> Turn:
        num, width = self._num_groups, -(-length // BLOCK_SIZE)
        rows = tuple(
            prefill(length, seq_id=i, first_block=i * num * width, num_groups=num)
            for i in range(count)
        )
        return lambda: timed(lambda: self._runner.launch(ScheduledBatch(rows)).collect(), 1)


class GenerateSteps:
    """Forward passes of the model with transformers' cache and its choice of attention."""

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._context = args.context
        torch.set_num_threads(args.threads)
        self._model = random_model(directory, args.device)

    def close(self) -> None:
        """Has nothing to end."""

    @torch.inference_mode()
    def decode(self, size: int) -> Turn:
        cache = DynamicCache(config=self._model.config)
        device = self._model.device
        known = torch.arange(self._context, device=device)[None].expand(size, -1)
        self._forward(known, cache)
        token = torch.full((size, 1), 5, device=device)

        def step() -> object:
            out = self._forward(token, cache)
            cache.crop(-1)  # the token that this step has added
            return out

        return lambda: timed(step)

    def prefill(self, length: int, count: int) -> Turn:
        tokens = torch.arange(length, device=self._model.device)[None].expand(count, -1) % 1000

        def step() -> object:
            return self._forward(tokens, DynamicCache(config=self._model.config))

        return lambda: timed(step, 1)

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> list[int]:
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
        return ids


class ContinuousSteps:
    """Steps of transformers' own continuous batching, greedy, in the manager's thread."""

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self._context = args.context
        torch.set_num_threads(1)  # of this thread, which computes no step
        model = random_model(directory, args.device)
        model.set_attn_implementation(args.attention)
        most = max([*args.batch, 1]) * (args.context + STEPS_OF_A_TURN + 2)
        longest = max([*args.prefill, 1]) * max([*args.prompts, 1])
        # A prompt's last page and what is free by the scheduler's margin come on top.
        pages = 2 * (max(most, longest) // args.page_size + max([*args.batch, *args.prompts, 1]))
        fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
        size: Any = "page_size" if "page_size" in fields else "block_size"  # before 5.18
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                **{size: args.page_size}, num_blocks=pages, max_batch_tokens=MAX_BATCHED_TOKENS
            ),
        )
        self._first = itertools.cycle(range(2000, SHAPES[args.shape]["vocab_size"]))
        torch.set_num_threads(args.threads)  # of the thread that begins
        self._manager.start()

    def close(self) -> None:
        self._manager.stop()

    def decode(self, size: int) -> Turn:
        prompts = [[5 + i] * self._context for i in range(size)]
        for prompt in prompts:  # into the prefix cache; alone, as one mask covers a whole step
            self._run([prompt], 1)

        def turn() -> list[float]:
            # Prompts whose last page is computed again may begin in different steps.
            outputs = self._run(prompts, STEPS_OF_A_TURN + 2)
            begin_s = max(output[0] for output in outputs)
            end_s = min(output[-1] for output in outputs)
            tokens_s = [moment for moment in outputs[-1] if begin_s <= moment <= end_s]
            return [later - earlier for earlier, later in itertools.pairwise(tokens_s)]

        return turn

    def prefill(self, length: int, count: int) -> Turn:
        def turn() -> list[float]:
            # Their first tokens are new, so that the prefix cache has none of them.
            prompts = [[next(self._first), *range(length - 1)] for _ in range(count)]
            begin_s = time.perf_counter()
            return [max(output[0] for output in self._run(prompts, 1)) - begin_s]

        return turn

    def _run(self, prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        """Returns the moments of each request's tokens. Raises RuntimeError where one fails."""
        # All are there when the next step is planned, where transformers can wait so (from 5.18).
        with getattr(self._manager, "pause", contextlib.nullcontext)():
            for prompt in prompts:
                self._manager.add_request(
                    prompt, max_new_tokens=num_tokens, record_timestamps=True, eos_token_id=-1
                )
        moments = []
        for _ in prompts:
            output = self._manager.get_result(timeout=TIMEOUT_S)
            if output is None or output.error is not None:
                raise RuntimeError(f"continuous batching has failed: {output and output.error}")
            moments.append(output.timestamps)
        return moments


def random_model(directory: str, device: str) -> Any:
    """Returns transformers' model with random weights in bfloat16."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class Apart:
    """Steps of a way in a process of its own."""

    def __init__(self, way: str, args: argparse.Namespace, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, way, args, directory))
        self._process.start()
        other.close()
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def decode(self, size: int) -> Turn:
        self._ask("decode", size)
        return lambda: self._ask("turn")

    def prefill(self, length: int, count: int) -> Turn:
        self._ask("prefill", length, count)
        return lambda: self._ask("turn")

    def cpu_s(self) -> float:
        """Returns what the process has worked."""
        return self._ask("cpu")[0]

    def _ask(self, *question: object) -> list[float]:
        """Raises EOFError where the process has failed."""
        self._pipe.send(question)
        times: list[float] = self._pipe.recv()
        return times


def serve(pipe: Connection, way: str, args: argparse.Namespace, directory: str) -> None:
    """Answers an Apart until it closes."""
    transformers_logging.set_verbosity_error()
    made = (GenerateSteps if way == "generate" else ContinuousSteps)(args, directory)
    turn: Turn = list
    pipe.send([])
    with contextlib.suppress(EOFError, ConnectionError):  # also of a bench that was killed
        while True:
            match pipe.recv():
                case ("decode", size):
                    turn = made.decode(size)
                    pipe.send([])
                case ("prefill", length, count):
                    turn = made.prefill(length, count)
                    pipe.send([])
                case ("cpu",):
                    pipe.send([time.process_time()])
                case _:
                    pipe.send(turn())
    made.close()


_MAKERS: dict[str, Callable[[argparse.Namespace, str], Any]] = {
    "native": lambda args, directory: OwnSteps(args, directory, "native"),
    "engine": lambda args, directory: OwnSteps(args, directory, "transformers"),
    "launched": lambda args, directory: OwnSteps(
        args, directory, "transformers", cuda_graphs=False
    ),
    "generate": lambda args, directory: Apart("generate", args, directory),
    "continuous_batching": lambda args, directory: Apart("continuous_batching", args, directory),
}


def report(
    line: dict[str, object], turns: dict[str, Turn], ways: dict[str, Any], seconds: float
) -> None:
    """Prints the median and the shortest time of each way's steps; the first turn warms up."""

    def cpu_s() -> float:
        apart = (way for way in ways.values() if isinstance(way, Apart))
        return time.process_time() + sum(way.cpu_s() for way in apart)

    times: dict[str, list[float]] = {way: [] for way in turns}
    busy_before = own_before = begin_s = 0.0
    for number in itertools.count():
        if number == 1:
            times = {way: [] for way in turns}
            busy_before, own_before, begin_s = busy_s(), cpu_s(), time.perf_counter()
        for way, turn in turns.items():
            times[way] += turn()
        wall_s = time.perf_counter() - begin_s
        if number >= STEPS_OF_A_TURN and wall_s > seconds * len(turns):
            break
    others_s = busy_s() - busy_before - (cpu_s() - own_before)
    line["foreign"] = round(max(0.0, others_s / wall_s), 2)
    for way, values in times.items():
        values.sort()
        line[f"{way}_ms"] = round(values[len(values) // 2] * 1e3, 2)
        line[f"{way}_best_ms"] = round(values[0] * 1e3, 2)
        num_tokens = int(str(line["tokens"])) * int(str(line["prompts"]))
        line[f"{way}_tokens_per_s"] = round(num_tokens / values[len(values) // 2])
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
