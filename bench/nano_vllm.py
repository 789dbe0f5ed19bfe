"""Our engine beside nano-vllm: equal weights, the same requests, in turns; the ratio comes last.

    python3 -m bench.nano_vllm --shape qwen3-0.6b --out results

The requests are those of bench.engine_throughput, drawn at temperature 0.6, as nano-vllm's
own benchmark has them. Random weights are made on the device and written once; each run is a
process that loads them, of at most --bound seconds. One that fails is said and recorded, and the
others go on; then the exit status is 1. Where nano-vllm cannot be imported the status is 3.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.engine_throughput import works
from bench.shapes import SHAPES, make_shape

NOT_THERE = 3
TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096


def main() -> int:
    args = _arguments()
    if args.peer_of is not None:
        print(json.dumps(_peer(args)), flush=True)
        os._exit(0)  # what nano-vllm does at exit, it may wait for without end
    args.out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("nanovllm") is None:
        print(f"nano-vllm: not there: {sys.executable} cannot import it; nothing measured")
        return NOT_THERE
    bounds = ["--shortest", str(args.shortest), "--longest", str(args.longest)]
    common = [*bounds, "--requests", str(args.requests)]
    found: dict[str, list[float]] = {"penstock": [], "nano-vllm": []}
    with tempfile.TemporaryDirectory() as place:
        directory = _checkpoint(Path(place), args.shape, args.device)
        ours = ["bench.engine_throughput", "--checkpoint", str(directory)]
        ours += ["--shape", args.shape, "--device", args.device]
        ours += ["--temperature", str(TEMPERATURE), *common]
        theirs = ["bench.nano_vllm", "--peer-of", str(directory), *common]
        for turn in range(args.turns):
            both = [("penstock", ours), ("nano-vllm", theirs)]
            for label, words in both[:: -1 if turn % 2 else 1]:
                line = _last_line(words, args.bound)
                with (args.out / "nano_vllm.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"label": label, "turn": turn, **line}) + "\n")
                if "failed" in line:
                    print(f"{label}: {line['failed']}", flush=True)
                    continue
                found[label].append(line["output_tokens_per_s"])
                print(f"{label}: {line['output_tokens_per_s']:,.0f} tok/s", flush=True)
    medians = {label: statistics.median(values) for label, values in found.items() if values}
    for label, median in medians.items():
        print(f"{args.shape}, {label}: {median:,.0f} tok/s, median of {len(found[label])}")
    if len(medians) == len(found):
        ratio = medians["penstock"] / medians["nano-vllm"]
        print(f"{args.shape}: {ratio:.2f} of nano-vllm")
    return int(any(len(values) < args.turns for values in found.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of our engine")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--bound", type=float, default=120.0, help="seconds of one run")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(".penstock") / "gpu-bench")
    parser.add_argument("--peer-of", type=Path, help=argparse.SUPPRESS)  # its run, of these weights
    return parser.parse_args()


def _checkpoint(place: Path, shape: str, device: str) -> Path:
    """Writes a checkpoint of random weights, as published ones are; returns its directory."""
    import torch
    from safetensors.torch import save_file

    from worker.model.config.model_config import ModelConfig
    from worker.model.layers.decoder import CausalLM
    from worker.model.parallel.group import Placement
    from worker.model.weights.loader import fill_with_noise

    directory = make_shape(place, shape)
    placement = Placement(torch.device(device), torch.bfloat16)
    model = CausalLM(ModelConfig.from_directory(directory), MAX_MODEL_LEN, placement)
    fill_with_noise(model)
    tensors = {
        name: part.data.cpu().contiguous().clone()
        for name, part in model.named_tensors()
        if part.data is not None
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _peer(args: argparse.Namespace) -> dict[str, Any]:
    """Runs nano-vllm; returns what it did."""
    from nanovllm import LLM, SamplingParams

    begin_s = time.monotonic()
    llm = LLM(str(args.peer_of), enforce_eager=False, max_model_len=MAX_MODEL_LEN)
    load_s = time.monotonic() - begin_s
    vocab_size = json.loads((args.peer_of / "config.json").read_text())["vocab_size"]
    found = list(works(vocab_size, (args.shortest, args.longest), args.requests))
    prompts = [list(prompt) for prompt, _ in found]
    params = [
        SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=num_output)
        for _, num_output in found
    ]
    llm.generate(prompts[:8], params[:8], use_tqdm=False)  # the last kernels are compiled
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin_s
    wanted = sum(num_output for _, num_output in found)
    seen = sum(len(output["token_ids"]) for output in outputs)
    assert seen == wanted, (seen, wanted)
    return {
        "load_s": round(load_s, 1),
        "seconds": round(seconds, 2),
        "output_tokens": wanted,
        "output_tokens_per_s": round(wanted / seconds, 1),
    }


def _last_line(words: list[str], bound_s: float) -> dict[str, Any]:
    """Runs a program of the bench; returns the JSON of its last line, or how it failed."""
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=bound_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {bound_s:.0f} s"}
    if done.returncode:
        return {"failed": f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
