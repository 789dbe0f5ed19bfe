"""Output tokens a second of the engine alone: requests of random lengths, all there at once.

    python3 -m bench.engine_throughput --device cuda --shape qwen3-0.6b
    python3 -m bench.engine_throughput --device cuda --attention sdpa --no-graphs

Needs torch; no network, no Redis. Random weights; 256 requests whose prompts and outputs have 100
to 1024 tokens each, as nano-vllm's benchmark has them. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.shapes import SHAPES
from shared.messages import SamplingParams
from worker.engine.engine import Engine
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.model.build import BuiltModel, build_model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--checkpoint", type=Path, help="its weights, in place of random ones")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--attention", choices=("auto", "triton", "sdpa"), default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--seqs", type=int, default=256, help="MAX_NUM_SEQS")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="MAX_NUM_BATCHED_TOKENS")
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    args = parser.parse_args()
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = SHAPES[args.shape] | {"tie_word_embeddings": True, "dtype": "bfloat16"}
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        built = build_model(
            EngineOptions(
                checkpoint=str(args.checkpoint or directory),
                load_format="auto" if args.checkpoint else "dummy",
                device=args.device,
                attention_backend=args.attention,
                cuda_graphs=not args.no_graphs,
                max_num_seqs=args.seqs,
                max_num_batched_tokens=args.batched_tokens,
                max_model_len=4096,
            )
        )
    load_s = time.monotonic() - begin_s
    run(built, args, num_requests=8)  # the last kernels are compiled
    line = run(built, args, num_requests=args.requests)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    given = {name: value for name, value in vars(args).items() if name != "device"}
    given["checkpoint"] = str(args.checkpoint or "")
    print(json.dumps({"device": name, **given, "load_s": round(load_s, 1), **line}))
    return 0


def works(
    vocab_size: int, bounds: tuple[int, int], num_requests: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields prompts and lengths of outputs, both within `bounds`; every call the same."""
    numbers = random.Random(0)
    for _ in range(num_requests):
        prompt = tuple(numbers.randrange(vocab_size) for _ in range(numbers.randint(*bounds)))
        yield prompt, numbers.randint(*bounds)


def run(built: BuiltModel, args: argparse.Namespace, num_requests: int) -> dict[str, object]:
    engine = Engine(built.engine_config, built.runner)
    num_prompt = num_output = 0
    bounds = (args.shortest, args.longest)
    for i, (prompt, output) in enumerate(
        works(built.model_config.vocab_size, bounds, num_requests)
    ):
        params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=output,
            ignore_eos=True,
            seed=i,
        )
        engine.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
        num_prompt += len(prompt)
        num_output += output
    begin_s, begin_cpu_s, steps, seen = time.perf_counter(), time.thread_time(), 0, 0
    while engine.has_unfinished():
        for output_ in engine.step():
            assert not output_.error, output_.message
            seen += len(output_.token_ids)
        steps += 1
    seconds = time.perf_counter() - begin_s
    assert seen == num_output, (seen, num_output)
    return {
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "steps": steps,
        "host_ms_a_step": round(1e3 * (time.thread_time() - begin_cpu_s) / steps, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
