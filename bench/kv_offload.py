"""Prompt tokens computed twice by conversations that do not fit the KV cache, with offloading.

    python -m bench.kv_offload --shape smollm2-135m

Random weights, the engine alone. `--conversations` take turns: each turn has the whole conversation
so far, its answer of 20 tokens and 80 new ones, and `--concurrent` of them run at once. Without
offloading, then with host memory for all blocks, then with host memory for an eighth of them and
a disk for the rest; then the same turns again with this disk, as after a restart. A token is
computed twice when the turn before had it, in its prompt or answer, and after the restart always.
Prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import conditions
from bench.shapes import SHAPES
from shared.messages import SamplingParams
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model
from worker.model.config.model_config import ModelConfig
from worker.model.kv_cache import block_bytes

FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 600, 80, 20
BLOCK_SIZE = 16


class Conversations:
    """Turns of one engine, and sums of what they were."""

    def __init__(self, built: BuiltModel, arguments: argparse.Namespace, *, is_known: bool) -> None:
        """`is_known`: all tokens were computed before."""
        self._engine = Engine(built.engine_config, built.runner, time.perf_counter, built.disk)
        self._rng = random.Random(1)
        self._vocab_size = built.model_config.vocab_size
        self._number = arguments.conversations
        self._concurrent = arguments.concurrent
        self._prompts = [self._tokens(FIRST_TOKENS) for _ in range(self._number)]
        self._is_known = is_known
        self._known = [0] * self._number  # tokens of the turn before
        self._answers: dict[int, list[int]] = {}
        self.num_twice = self.num_prompt = 0
        self.first_token_s: list[float] = []

    def turn(self) -> None:
        waiting = list(range(self._number))
        self._rng.shuffle(waiting)
        running: dict[str, int] = {}
        while waiting or running:
            while waiting and len(running) < self._concurrent:
                i = waiting.pop()
                running[str(i)] = i
                self._add(i)
            for output in self._engine.step():
                assert output.error is None, output.message
                i = running[output.request_id]
                self._answers[i] += output.token_ids
                if output.finish_reason is not None:
                    del running[output.request_id]
                    assert output.times is not None
                    self._ended(i, output.num_cached_tokens, output.times.prefill_s)

    def stats(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "stored_blocks": stats.offload_stored_blocks,
            "loaded_blocks": stats.offload_loaded_blocks,
            "unwritten_blocks": stats.offload_unwritten_blocks,
            "disk_blocks": stats.offload_disk_blocks,
        }

    def _add(self, i: int) -> None:
        self._answers[i] = []
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        prompt = tuple(self._prompts[i])
        self._engine.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))

    def _ended(self, i: int, num_cached: int, prefill_s: float) -> None:
        prompt = self._prompts[i]
        if self._is_known:
            self._known[i] = len(prompt)
        if self._known[i]:
            self.num_prompt += len(prompt)
            self.num_twice += self._known[i] - num_cached
            self.first_token_s.append(prefill_s)
        self._known[i] = len(prompt) + OUTPUT_TOKENS
        prompt += [*self._answers[i], *self._tokens(NEW_TOKENS)]

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--concurrent", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--pool", type=float, default=0.25, help="part of the blocks that fit it")
    arguments = parser.parse_args()
    print(json.dumps(conditions()), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[arguments.shape] | {"tie_word_embeddings": True, "dtype": "bfloat16"}
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        all_gb = _run(arguments, directory, "off", 0.0, "")
        _run(arguments, directory, "host", all_gb, "")
        for way in ("disk", "disk, restarted"):
            _run(arguments, directory, way, all_gb / 8, f"{directory}/kv")


def _run(
    arguments: argparse.Namespace, checkpoint: str, way: str, host_gb: float, disk: str
) -> float:
    """Prints what the turns cost, and returns the GiB of all their blocks."""
    longest = FIRST_TOKENS + arguments.turns * (NEW_TOKENS + OUTPUT_TOKENS)
    num_blocks = arguments.conversations * -(-longest // BLOCK_SIZE)
    built = build_model(
        EngineOptions(
            checkpoint=checkpoint,
            load_format="dummy",
            device=arguments.device,
            block_size=BLOCK_SIZE,
            num_kv_blocks=int(num_blocks * arguments.pool),
            max_num_seqs=arguments.concurrent,
            max_model_len=longest + BLOCK_SIZE,
            kv_offloading_gb=host_gb,
            kv_offloading_dir=disk,
        )
    )
    try:
        conversations = Conversations(built, arguments, is_known="restarted" in way)
        begin_s = time.perf_counter()
        for _ in range(arguments.turns):
            conversations.turn()
        seconds = time.perf_counter() - begin_s
    finally:
        built.close()
    prefill_s = conversations.first_token_s
    line = {
        "way": way,
        "prompt_tokens": conversations.num_prompt,
        "computed_twice": conversations.num_twice,
        "seconds": round(seconds, 1),
        "prefill_ms": round(1000 * sum(prefill_s) / len(prefill_s)),
        **conversations.stats(),
    }
    print(json.dumps(line), flush=True)
    shape = ModelConfig.from_directory(checkpoint)
    return float(num_blocks * block_bytes(shape, BLOCK_SIZE, torch.bfloat16) / 2**30)


if __name__ == "__main__":
    main()
