"""Embeddings a second: the engine, and transformers in batches sorted by length.

    python -m bench.embeddings [--inputs N] [--turns N]

The model has all-MiniLM-L6-v2's shape and random weights. Both compute the same inputs of 3 to 250
tokens in float32, in turns. The peer does what `encode` of sentence-transformers does: batches of
32 inputs of similar length, padded to the longest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, BertConfig, BertModel

from shared.messages import Pooling, SamplingParams
from worker.engine.interface import EngineInterface
from worker.engine.request import EngineRequest
from worker.engine_options import EngineOptions
from worker.engines.penstock import build_own_engine

SHAPE = BertConfig(
    vocab_size=30_522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    max_position_embeddings=512,
)
BATCH = 32


def make_model(path: Path) -> None:
    """Writes the checkpoint, without a tokenizer."""
    torch.manual_seed(0)
    BertModel(SHAPE).save_pretrained(path)
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"path": name, "type": f"sentence_transformers.models.{kind}"} for name, kind in kinds
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))


def by_engine(engine: EngineInterface, inputs: Sequence[Sequence[int]]) -> None:
    """Computes the inputs as one request."""
    engine.add(
        EngineRequest(
            request_id="r",
            prompt_token_ids=tuple(token_id for one in inputs for token_id in one),
            params=SamplingParams(max_tokens=0, temperature=0.0, seed=0),
            pooling=Pooling(tuple(map(len, inputs)), SHAPE.hidden_size),
        )
    )
    while engine.has_unfinished():
        engine.step()


@torch.inference_mode()
def by_transformers(model: BertModel, inputs: Sequence[Sequence[int]]) -> None:
    """Computes the inputs in batches of similar length."""
    ordered = sorted(inputs, key=len, reverse=True)
    for begin in range(0, len(ordered), BATCH):
        batch = ordered[begin : begin + BATCH]
        token_ids = torch.zeros(len(batch), len(batch[0]), dtype=torch.int64)
        mask = torch.zeros_like(token_ids)
        for row, one in enumerate(batch):
            token_ids[row, : len(one)] = torch.tensor(one)
            mask[row, : len(one)] = 1
        hidden = model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].float()
        normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1)).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    draw = random.Random(0)
    inputs = [
        [draw.randrange(1000, 30_000) for _ in range(draw.randint(3, 250))]
        for _ in range(arguments.inputs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        options = EngineOptions(checkpoint=folder, device="cpu", dtype="float32")
        built = build_own_engine(options, lambda stage, share: None, lambda why: None)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        seconds: dict[str, list[float]] = {"penstock": [], "transformers": []}
        for _ in range(arguments.turns + 1):
            for name, compute in (
                ("penstock", lambda: by_engine(built.engine, inputs)),
                ("transformers", lambda: by_transformers(model, inputs)),
            ):
                begin_s = time.perf_counter()
                compute()
                seconds[name].append(time.perf_counter() - begin_s)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name, median_s in medians.items():
        print(f"{name:>14} {len(inputs) / median_s:7.1f} embeddings a second")
    print(f"         ratio {medians['transformers'] / medians['penstock']:.2f}")


if __name__ == "__main__":
    main()
