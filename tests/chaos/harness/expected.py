"""What an undisturbed run would have said: to each prompt there is one answer.

The echo runner's is a function of the prompt. A model's is that of this project's engine in the
test's process, in float32, for prompts that are drawn before anything begins.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared.messages import SamplingParams
from shared.text.tokenizer import FastTokenizer

NUM_PLAIN_TOKENS = 340  # ids below are ordinary tokens, some of them bytes inside a character


@dataclass(frozen=True, slots=True)
class Expected:
    """A whole answer."""

    token_ids: tuple[int, ...]
    text: str


class Answers(Protocol):
    """What is asked in a long round, and what is answered."""

    def draw(self, rng: random.Random) -> list[int]:
        """Returns a prompt."""
        ...

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Returns further members of the request with this prompt."""
        ...

    def of(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        """Returns the answer to it."""
        ...


class EchoText:
    """Knows every echo of a checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = FastTokenizer.from_bytes((checkpoint / "tokenizer.json").read_bytes())

    def draw(self, rng: random.Random) -> list[int]:
        return random_prompt(rng, rng.randint(4, 40))

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {}

    def of(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        token_ids = tuple(prompt[i % len(prompt)] for i in range(num_tokens))
        return Expected(token_ids, self._tokenizer.decode(token_ids))


class ModelText:
    """Knows a model's answers to some prompts: half of them greedy, the others sampled."""

    NUM_PROMPTS = 64

    def __init__(self, checkpoint: Path, max_tokens: int, rng: random.Random) -> None:
        from worker.llm import LLM  # torch comes with it

        self._tokenizer = FastTokenizer.from_bytes((checkpoint / "tokenizer.json").read_bytes())
        self._prompts = [random_prompt(rng, rng.randint(4, 40)) for _ in range(self.NUM_PROMPTS)]
        llm = LLM(str(checkpoint), dtype="float32", device="cpu", max_model_len=512)
        params = [
            SamplingParams(max_tokens=max_tokens, **self.request(prompt))
            for prompt in self._prompts
        ]
        results = llm.generate(self._prompts, params, progress=False)
        self._token_ids = {
            tuple(prompt): result.token_ids
            for prompt, result in zip(self._prompts, results, strict=True)
        }

    def draw(self, rng: random.Random) -> list[int]:
        return rng.choice(self._prompts)

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        how = {"temperature": 0.0} if prompt[0] % 2 else {"temperature": 0.9, "top_p": 0.95}
        return {**how, "seed": sum(prompt), "ignore_eos": True}

    def of(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        token_ids = self._token_ids[tuple(prompt)][:num_tokens]
        return Expected(token_ids, self._tokenizer.decode(token_ids))


def never_end(checkpoint: Path) -> None:
    """Makes the model of a tiny checkpoint one that never ends an answer by itself."""
    import torch  # heavy: only for a round with a model
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    ends = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    tensors["lm_head.weight"][torch.tensor(ends)] = 0.0  # far below the best of the others
    save_file(tensors, path, {"format": "pt"})


def random_prompt(rng: random.Random, num_tokens: int = 24) -> list[int]:
    """Any tokens: their text has characters in pieces, which readers must never see in pieces."""
    return [rng.randrange(NUM_PLAIN_TOKENS) for _ in range(num_tokens)]
