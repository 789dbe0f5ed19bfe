"""What an undisturbed run would have said: the echo runner's answer is a function of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.text.tokenizer import FastTokenizer

NUM_PLAIN_TOKENS = 340  # ids below are ordinary tokens, some of them bytes inside a character


@dataclass(frozen=True, slots=True)
class Expected:
    """A whole answer."""

    token_ids: tuple[int, ...]
    text: str


class EchoText:
    """Knows every echo of a checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = FastTokenizer.from_bytes((checkpoint / "tokenizer.json").read_bytes())

    def of(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        token_ids = tuple(prompt[i % len(prompt)] for i in range(num_tokens))
        return Expected(token_ids, self._tokenizer.decode(token_ids))


def random_prompt(rng: random.Random, num_tokens: int = 24) -> list[int]:
    """Any tokens: their text has characters in pieces, which readers must never see in pieces."""
    return [rng.randrange(NUM_PLAIN_TOKENS) for _ in range(num_tokens)]
