"""Loading a checkpoint beside the disk alone, and beside safetensors' own reader, as JSON lines.

    python -m bench.loading --shape qwen3-0.6b --runs 5

Writes random weights of the shape once (in bfloat16, in --directory, whose disk is measured), or
takes a --checkpoint. The three run in turns: with pages that were dropped from the page cache
(posix_fadvise) and with pages that are in it. "disk" reads the same bytes in the same pieces by as
many threads, into a buffer that each thread keeps: no weights, no conversion. "safetensors" copies
what `safe_open` maps, tensor by tensor. Each line has the medians of wall and CPU time; the last is
a sentence for each kind of pages.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.machine import cpu_name
from bench.shapes import SHAPES
from worker.model.config.model_config import ModelConfig
from worker.model.layers.decoder import CausalLM
from worker.model.parallel.group import Placement
from worker.model.weights.loader import Checkpoint, fill_with_noise
from worker.model.weights.reader import NUM_THREADS, PIECE_BYTES

MAX_MODEL_LEN = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--checkpoint", type=Path, help="in place of a shape")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pages", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    arguments = parser.parse_args()
    with checkpoint(arguments) as (directory, config):
        placement = Placement(torch.device(arguments.device), getattr(torch, arguments.dtype))
        files = sorted(directory.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)

        def ours() -> None:
            Checkpoint(directory, config).load(CausalLM(config, MAX_MODEL_LEN, placement))
            settle(placement.device)

        def mapped() -> None:
            places = dict(CausalLM(config, MAX_MODEL_LEN, placement).named_tensors())
            for file in files:
                with safe_open(file, framework="pt", device=arguments.device) as tensors:
                    for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                        if (place := places.get(name)) is not None and place.data is not None:
                            place.data.copy_(tensors.get_tensor(name))
            settle(placement.device)

        ways = {"disk": lambda: read_all(files), "safetensors": mapped, "ours": ours}
        facts = {"cpu": cpu_name(), "torch": torch.__version__, "device": arguments.device}
        for pages in arguments.pages:
            took = measure(ways, files, pages, arguments.runs)
            for name, (seconds, cpu_seconds) in took.items():
                figures = {
                    "gigabytes": round(size / 1e9, 3),
                    "seconds": round(seconds, 3),
                    "gigabytes_per_s": round(size / 1e9 / seconds, 2),
                    "cpu_seconds": round(cpu_seconds, 3),
                }
                print(json.dumps({**facts, "pages": pages, "way": name, **figures}), flush=True)
            rates = {name: size / 1e9 / seconds for name, (seconds, _) in took.items()}
            print(
                f"{pages}: read {size / 1e9:.2f} GB in {took['ours'][0]:.2f} s: "
                f"{rates['ours']:.2f} GB/s; the disk alone gives {rates['disk']:.2f} GB/s",
                flush=True,
            )


@contextmanager
def checkpoint(arguments: argparse.Namespace) -> Iterator[tuple[Path, ModelConfig]]:
    """Yields a directory with weights, and their config."""
    if arguments.checkpoint is not None:
        yield arguments.checkpoint, ModelConfig.from_directory(arguments.checkpoint)
        return
    config = ModelConfig.from_dict(SHAPES[arguments.shape] | {"tie_word_embeddings": True})
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        model = CausalLM(config, MAX_MODEL_LEN, Placement(torch.device("cpu"), torch.bfloat16))
        fill_with_noise(model)
        tensors = {
            name: place.data for name, place in model.named_tensors() if place.data is not None
        }
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})
        yield Path(directory), config


def measure(
    ways: dict[str, Callable[[], None]], files: list[Path], pages: str, runs: int
) -> dict[str, tuple[float, float]]:
    """Returns each way's median seconds of wall and CPU time, of runs in turns."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, run in ways.items():
            drop(files) if pages == "cold" else read_all(files)
            wall, cpu = time.perf_counter(), cpu_seconds()
            run()
            took[name].append((time.perf_counter() - wall, cpu_seconds() - cpu))
    return {
        name: (statistics.median(w for w, _ in each), statistics.median(c for _, c in each))
        for name, each in took.items()
    }


def drop(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path]) -> None:
    own = threading.local()

    def read(file: Path, offset: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(PIECE_BYTES)
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            opened.readinto(own.buffer)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        parts = [
            (file, offset)
            for file in files
            for offset in range(0, file.stat().st_size, PIECE_BYTES)
        ]
        for future in [pool.submit(read, *part) for part in parts]:
            future.result()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
