"""`python -m tests.neighbours.joining_model REDIS_URL NAMESPACE`: a worker of a model with 262,144
tokens joins: its card and its blobs are announced once a line comes on the standard input."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.text.checkpoint_text import card_from_checkpoint
from shared.transport.connect import open_transport

NAME, NUM_TOKENS = "large-vocabulary", 262_144


def write_tokenizer(
    path: Path, num_tokens: int = NUM_TOKENS, template: str = "{{ messages[-1].content }}"
) -> None:
    """Writes a byte-level BPE of random merges, and what a card needs beside it."""
    chooser, tokens = random.Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["</s>", *tokens])}
    merges = []
    while len(vocabulary) < num_tokens:
        left, right = chooser.choice(tokens), chooser.choice(tokens)
        if len(left + right) > 12 or left + right in vocabulary:
            continue
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
        tokens.append(left + right)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"vocab_size": num_tokens}))


async def main(redis_url: str, namespace: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        card, blobs = card_from_checkpoint(
            directory,
            name=NAME,
            max_model_len=512,
            kv_capacity_tokens=4096,
            dtype="",
            num_parameters=1,
            structured_output=True,
        )
    transport = await open_transport(redis_url, namespace=namespace)
    print("made", flush=True)
    sys.stdin.readline()
    await transport.queue.setup([NAME])
    await transport.queue.announce(NAME, card.to_json(), blobs)
    await transport.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
