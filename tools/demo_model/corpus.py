"""The corpus: conversations and plain text as token rows, drawn without end from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.prose import chunks
from tools.demo_model.questions import Fact
from tools.demo_model.rephrase import rephrase
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START, special_id

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are the demo model of Penstock.",
    "You answer questions about Penstock.",
    "Be short and friendly.",
    "You are a friendly chatbot.",
    "Answer in one sentence.",
    "You are an expert in distributed systems.",
    "You are a pirate.",
    "Today is Friday. You are an AI assistant that helps users with their questions.",
)
_UNFAMILIAR_FRAMES = (
    "what is {a}",
    "what is a {a}",
    "what is the {a} of {b}",
    "how do i {a} a {b}",
    "how do i {a} the {b}",
    "who is {a}",
    "who is {a} {b}",
    "tell me about {a}",
    "tell me about the {a} {b}",
    "explain {a}",
    "where is the {a}",
    "when was the {a} {b}",
    "why is the {a} {b}",
    "can you {a} my {b}",
    "do you like {a}",
    "{a} {b}",
    "{a}",
    "write a {a} about {b}",
    "what does {a} mean",
    "which {a} is the best {b}",
    "how many {a} has a {b}",
    "give me a {a}",
    "what is the difference between {a} and {b}",
    "what {a} do you {b}",
    "have you {a} a {b}",
    "i {a} {b}",
)
_IGNORED = -100  # a label that carries no loss
PROSE_SHARE = 0.12  # of documents
PROSE_WEIGHT = 0.3  # of a prose token's loss, a chat token's being 1
MEAN_TURNS = 2.2
NUM_DECIDING_TOKENS = 8
DECIDING_WEIGHT = 2.0


class Document(NamedTuple):
    """Token ids and, for each, the weight of predicting it (0: given, not learned)."""

    token_ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows. All [rows, length]; `mask` is [rows, 1, length, length]."""

    token_ids: Tensor
    positions: Tensor
    labels: Tensor  # the next token, _IGNORED where nothing is learned
    weights: Tensor
    mask: Tensor


def render_chat(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> Document:
    """Returns ChatML as the template renders it; only the assistant's turns are learned."""
    start, end = special_id(tokenizer, TURN_START), special_id(tokenizer, TURN_END)
    token_ids: list[int] = []
    weights: list[float] = []
    newline = tokenizer.encode("\n").ids
    for role, content in messages:
        head = [start, *tokenizer.encode(f"{role}\n").ids]
        body = [*tokenizer.encode(content).ids, end]
        token_ids += head + body + newline
        learned = _answer_weights(len(body)) if role == "assistant" else [0.0] * len(body)
        weights += [0.0] * len(head) + learned + [0.0] * len(newline)
    return Document(token_ids, weights)


def _answer_weights(num_tokens: int) -> list[float]:
    """Returns weights: the first tokens decide which answer it is, and weigh more."""
    num_deciding = min(num_tokens, NUM_DECIDING_TOKENS)
    return [DECIDING_WEIGHT] * num_deciding + [1.0] * (num_tokens - num_deciding)


class Corpus:
    """Draws batches. The same facts, prose and seed give the same batches in the same order."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        facts: Sequence[Fact],
        prose: Sequence[str],
        unfamiliar: Sequence[str],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._facts = list(facts)
        self._unknown = next(fact for fact in facts if fact.name == "unknown")
        self._prose = [chunk for text in prose for chunk in chunks(text, 1200)]
        self._unfamiliar = unfamiliar
        self._rng = random.Random(seed)
        self._deck: list[Fact] = []

    def draw_question(self, fact: Fact, rng: random.Random) -> str:
        """Returns a question for the fact as a person might type it."""
        if fact is self._unknown and rng.random() < 0.6:
            frame = rng.choice(_UNFAMILIAR_FRAMES)
            words = rng.choice(self._unfamiliar), rng.choice(self._unfamiliar)
            return rephrase(frame.format(a=words[0], b=words[1]), rng)
        return rephrase(rng.choice(fact.trained), rng)

    def _draw_fact(self) -> Fact:
        """Draws every fact equally often, the answer to unknown questions more often."""
        if not self._deck:
            self._deck = [*self._facts, *[self._unknown] * (len(self._facts) // 12)]
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def conversation(self, max_tokens: int, *, fill: bool = False) -> Document:
        """Returns a chat of some turns; with `fill` as many turns as fit `max_tokens`."""
        rng = self._rng
        messages: list[tuple[str, str]] = []
        if rng.random() < 0.3:
            messages.append(("system", rng.choice(SYSTEM_PROMPTS)))
        document = render_chat(self._tokenizer, messages)
        while len(document.token_ids) < max_tokens:
            fact = self._draw_fact()
            turn = [("user", self.draw_question(fact, rng)), ("assistant", fact.answer)]
            rendered = render_chat(self._tokenizer, turn)
            document.token_ids.extend(rendered.token_ids)
            document.weights.extend(rendered.weights)
            if not fill and rng.random() < 1.0 / MEAN_TURNS:
                break
        return document

    def _draw_prose(self) -> Document:
        end = special_id(self._tokenizer, END_OF_TEXT)
        token_ids = [*self._tokenizer.encode(self._rng.choice(self._prose)).ids, end]
        return Document(token_ids, [PROSE_WEIGHT] * len(token_ids))

    def batch(self, rows: int, length: int, *, one_document: bool = False) -> Batch:
        """Rows of packed documents that do not see one another, or of one long chat each."""
        drawn: list[list[Document]] = []
        for _ in range(rows):
            row: list[Document] = []
            while sum(len(document.token_ids) for document in row) < length + 1:
                if one_document:
                    row.append(self.conversation(length + 1, fill=True))
                elif self._rng.random() < PROSE_SHARE:
                    row.append(self._draw_prose())
                else:
                    row.append(self.conversation(length))
            drawn.append(row)
        return pack(drawn, length)


def pack(rows: Sequence[Sequence[Document]], length: int) -> Batch:
    """Documents behind one another, positions from 0 in each, cut at `length`."""
    ids = torch.zeros(len(rows), length + 1, dtype=torch.long)
    weights = torch.zeros(len(rows), length + 1)
    positions = torch.zeros(len(rows), length + 1, dtype=torch.long)
    owners = torch.full((len(rows), length + 1), -1)
    for row, documents in enumerate(rows):
        at = 0
        for owner, document in enumerate(documents):
            n = min(len(document.token_ids), length + 1 - at)
            ids[row, at : at + n] = torch.tensor(document.token_ids[:n])
            weights[row, at : at + n] = torch.tensor(document.weights[:n])
            weights[row, at] = 0.0  # the first token follows from nothing
            positions[row, at : at + n] = torch.arange(n)
            owners[row, at : at + n] = owner
            at += n
    same = owners[:, :-1, None] == owners[:, None, :-1]
    mask = same & torch.ones(length, length, dtype=torch.bool).tril()
    labels = ids[:, 1:].masked_fill(weights[:, 1:] == 0, _IGNORED)
    return Batch(ids[:, :-1], positions[:, :-1], labels, weights[:, 1:], mask[:, None])
