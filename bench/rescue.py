"""Records a rescue: the worker that writes an answer is killed, another one continues it.

    python -m bench.rescue            writes docs/rescue.json, of which `make docs` draws rescue.svg

Starts Penstock as `make run` does, with two workers and the demo model. Beside zeros, which change
no output and cost time, the model writes at a reader's pace. The same question is asked twice: once
undisturbed; once with SIGKILL to the answer's worker in the middle. One client reads each stream
over one connection. Times are those of the client, in milliseconds since its request.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from bench.machine import cpu_name
from tests.support.launched import REPOSITORY, Launched

QUESTION = "What happens when a worker dies?"
RECORD = REPOSITORY / "docs/rescue.json"
DEMO = REPOSITORY / "worker/demo/checkpoint"
KILL_AFTER = 15  # tokens
WIDTH = 24  # times the demo's intermediate size
MORE_LAYERS = 12


def make_slower_demo(directory: Path) -> Path:
    """Returns the demo's checkpoint with zeros in its products, and layers that add zero."""
    shutil.copytree(DEMO, directory)
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    num_layers, narrow = config["num_hidden_layers"], config["intermediate_size"]
    wide = WIDTH * narrow
    for name, weight in list(weights.items()):
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = torch.cat([weight, torch.zeros(wide - narrow, weight.shape[1])])
        elif "down_proj" in name:
            weights[name] = torch.cat([weight, torch.zeros(weight.shape[0], wide - narrow)], dim=1)
        weights[name] = weights[name].to(weight.dtype).contiguous()
    last = f"model.layers.{num_layers - 1}."
    parts = {name[len(last) :]: weights[name] for name in weights if name.startswith(last)}
    for layer in range(num_layers, num_layers + MORE_LAYERS):
        for name, weight in parts.items():
            adds = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            weights[f"model.layers.{layer}.{name}"] = (
                torch.zeros_like(weight) if adds else weight.clone()
            )
    save_file(weights, directory / "model.safetensors")
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    config |= {"num_hidden_layers": num_layers + MORE_LAYERS, "intermediate_size": wide}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answer(client: httpx.Client, model: str) -> Iterator[tuple[str, str, int]]:
    """Yields the job's id, a token's text and the milliseconds until it came, of each token."""
    body = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    begin_s = time.monotonic()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            text = chunk["choices"][0]["delta"].get("content")
            if text:
                yield chunk["id"], text, round(1000 * (time.monotonic() - begin_s))


def kill_worker_of(client: httpx.Client, job_id: str) -> None:
    job = client.get(f"/v1/jobs/{job_id}").json()
    workers = client.get("/health").json()["workers"]
    (pid,) = [worker["pid"] for worker in workers if worker["id"] == job["worker"]]
    os.kill(pid, signal.SIGKILL)


def record(base_url: str, model: str) -> dict[str, Any]:
    """Returns both runs: the tokens of the client with the times at which they came, and what the
    job's record says of its attempts."""
    with httpx.Client(base_url=base_url, timeout=120) as client:
        undisturbed = [text for _, text, _ in answer(client, model)]
        tokens: list[tuple[int, str]] = []
        killed_ms = 0
        begin_s = time.monotonic()
        for name, text, came_ms in answer(client, model):
            tokens.append((came_ms, text))
            if len(tokens) == KILL_AFTER:
                kill_worker_of(client, name)
                killed_ms = round(1000 * (time.monotonic() - begin_s))
        job = client.get(f"/v1/jobs/{name}").json()
    attempts = [
        {
            "worker": attempt["worker"],
            "started_ms": round(1000 * (attempt["started_at"] - job["created_at"])),
            "tokens": attempt["completion_tokens"],
            "outcome": attempt["outcome"],
        }
        for attempt in job["attempts"]
    ]
    return {
        "question": QUESTION,
        "cpu": cpu_name(),
        "killed_ms": killed_ms,
        "tokens": tokens,
        "attempts": attempts,
        "undisturbed": "".join(undisturbed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=RECORD)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        checkpoint = make_slower_demo(Path(name) / "demo")
        env = {"WORKERS": "2", "MODEL": str(checkpoint), "SERVED_MODEL_NAME": "penstock-demo"}
        with Launched(Path(name), env, is_forked=False) as penstock:
            found = record(penstock.base_url, "penstock-demo")
    options.to.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
