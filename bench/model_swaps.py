"""Swaps between two models on one worker: the load with pages in the page cache, and the waits.

    python -m bench.model_swaps --shape smollm2-135m --swaps 10

Writes two checkpoints of the shape with random weights in bfloat16, starts Penstock as `make run`
does with both in PENSTOCK_MODELS, and sends one request at a time to each in turn, so that each
request waits for a swap of an idle worker. In the pause before it the worker prepares the next
engine process. Prints a JSON line: seconds of the swaps, from the last
job of a model until the next one is served, and of the requests' waits in the queue, which include
the time until the worker looks; then the medians of a swap's parts, by the worker's log.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

from bench.loading import MAX_MODEL_LEN
from bench.machine import conditions
from bench.shapes import SHAPES, make_shape
from tests.support.launched import Launched
from worker.model.config.model_config import ModelConfig
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.weights.loader import fill_with_noise

NAMES = ("a", "b")
# What ends a part of a swap, in the order of the log: a message, and its stage.
PARTS = {
    (
        "the engine is loading the model",
        "loading weights",
        0,
    ): "former process ends, files are checked",
    ("the engine is loading the model", "loading weights", 100): "weights are read",
    ("the engine is loading the model", "laying out weights", 100): "weights are laid out",
    ("the engine is loading the model", "allocating KV cache", 100): "KV cache",
    ("the engine is loading the model", "warming up", 100): "masks of the vocabulary, first step",
    ("the model is loaded", None, None): "self-test, text files",
    ("another model is served", None, None): "announcement",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=5.0, help="before each request")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        paths = {name: write_model(directory / name, arguments.shape) for name in NAMES}
        settings = {
            "MODELS": ",".join(f"{name}={path}" for name, path in paths.items()),
            "DEVICE": "cpu",
            "NUM_KV_BLOCKS": "256",
            "MAX_MODEL_LEN": "1024",
            "LOG_FORMAT": "json",
        }
        with Launched(directory, settings, is_forked=False) as penstock:
            waits_s = []
            for number in range(arguments.swaps + 1):
                time.sleep(arguments.pause_s)
                waits_s.append(ask(penstock.base_url, number))
            del waits_s[0]  # of the model that was loaded at the start
            swaps = read_swaps(penstock.output)
    swaps_s = sorted(swap["swap_s"] for swap in swaps)
    figures = {
        "shape": arguments.shape,
        "swaps": len(swaps_s),
        "swap_s_p50": round(statistics.median(swaps_s), 2),
        "swap_s_max": round(swaps_s[-1], 2),
        "wait_s_p50": round(statistics.median(waits_s), 2),
        "wait_s_max": round(max(waits_s), 2),
    }
    print(json.dumps(conditions() | figures))
    for part in PARTS.values():
        seconds = [swap[part] for swap in swaps if part in swap]
        print(f"{part:50} {statistics.median(seconds):6.3f} s")


def read_swaps(output: str) -> list[dict[str, float]]:
    """Returns the seconds of each swap and of its parts."""
    swaps: list[dict[str, float]] = []
    at_s = 0.0
    for line in output.splitlines():
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        now_s = datetime.fromisoformat(entry["time"]).timestamp()
        if entry["message"] == "loading another model next: its jobs wait":
            swaps.append({})
        elif part := PARTS.get((entry["message"], entry.get("stage"), entry.get("percent"))):
            if not swaps:
                continue
            swaps[-1][part] = now_s - at_s
            swaps[-1]["swap_s"] = entry.get("swap_s", 0.0)
        else:
            continue
        at_s = now_s
    return swaps


def write_model(directory: Path, shape: str) -> Path:
    path = make_shape(directory, shape)
    config = ModelConfig.from_directory(path)
    model = CausalLM(config, MAX_MODEL_LEN, Placement(torch.device("cpu"), torch.bfloat16))
    fill_with_noise(model)
    tensors = {name: place.data for name, place in model.named_tensors() if place.data is not None}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def ask(base_url: str, number: int) -> float:
    """Sends a request to one of the models; returns the seconds that its job waited."""
    body = {"model": NAMES[number % 2], "prompt": "again", "max_tokens": 4, "stream": False}
    with httpx.Client(base_url=base_url, timeout=120) as client:
        answer = client.post("/generate", json=body).raise_for_status().json()
        job = client.get(f"/v1/jobs/{answer['id'].removeprefix('gen-')}").json()
    return float(job["timings"]["queue_ms"]) / 1000


if __name__ == "__main__":
    main()
