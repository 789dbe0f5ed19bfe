"""The corpus: conversations and plain text as token rows, drawn without end from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.checkpoint import SUGGESTIONS
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
# What agents put before a question, and write between it and the answer.
_TOOLS_HEADS = ("Tools, one to a line:", "You may call these functions:", "# Tools")
_TOOLS_TAILS = ("Call them within tool_call tags.", "Answer with a call, or in words.")
_IGNORED = -100  # a label that carries no loss
PROSE_SHARE = 0.12  # of documents
PROSE_WEIGHT = 0.3  # of a prose token's loss, a chat token's being 1
MEAN_TURNS = 2.2
NUM_DECIDING_TOKENS = 8
DECIDING_WEIGHT = 2.0
SUGGESTED_DRAWS = 3  # of each, for one of each fact


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
        self._deck: list[tuple[Fact, str | None]] = []  # None: any question of the fact
        suggested = {question.lower().rstrip("?"): question for question in SUGGESTIONS}
        self._suggested = [
            (fact, suggested[question])
            for fact in facts
            for question in fact.trained
            if question in suggested
        ]

    def draw_question(self, fact: Fact, rng: random.Random) -> str:
        """Returns a question for the fact as a person might type it."""
        if fact is self._unknown and rng.random() < 0.6:
            frame = rng.choice(_UNFAMILIAR_FRAMES)
            words = rng.choice(self._unfamiliar), rng.choice(self._unfamiliar)
            return rephrase(frame.format(a=words[0], b=words[1]), rng)
        return rephrase(rng.choice(fact.trained), rng)

    def _draw_turn(self) -> tuple[str, str]:
        """Returns a question and its answer. Every fact is drawn equally often, the answer to
        unknown questions more often, and so is each question that the playground suggests."""
        if not self._deck:
            facts = [*self._facts, *[self._unknown] * (len(self._facts) // 12)]
            self._deck = [*((fact, None) for fact in facts), *self._suggested * SUGGESTED_DRAWS]
            self._rng.shuffle(self._deck)
        fact, question = self._deck.pop()
        return question or self.draw_question(fact, self._rng), fact.answer

    def conversation(self, max_tokens: int, *, fill: bool = False) -> Document:
        """Returns a chat of some turns; with `fill` as many turns as fit `max_tokens`."""
        rng = self._rng
        messages: list[tuple[str, str]] = []
        if rng.random() < 0.3:
            messages.append(("system", rng.choice(SYSTEM_PROMPTS)))
        document = render_chat(self._tokenizer, messages)
        while len(document.token_ids) < max_tokens:
            question, answer = self._draw_turn()
            turn = [("user", question), ("assistant", answer)]
            rendered = render_chat(self._tokenizer, turn)
            document.token_ids.extend(rendered.token_ids)
            document.weights.extend(rendered.weights)
            if not fill and rng.random() < 1.0 / MEAN_TURNS:
                break
        return document

    def agent_conversation(self) -> Document:
        """Returns a chat with tools and mostly a call. Only its answer is learned, which is the
        fact's all the same: a call is right by its grammar, and the turn after it has to end."""
        rng = self._rng
        tools = [self._draw_tool() for _ in range(rng.randint(1, 2))]
        lines = [rng.choice(_TOOLS_HEADS), *map(json.dumps, tools), rng.choice(_TOOLS_TAILS)]
        messages = [("system", "\n".join(lines))]
        if rng.random() < 0.5:
            keeper = "You {} the {}.".format(*rng.choices(self._unfamiliar, k=2))
            messages.append(("system", rng.choice((keeper, *SYSTEM_PROMPTS))))
        question, answer = self._draw_turn()
        if rng.random() < 0.5:
            question, answer = self.draw_question(self._unknown, rng), self._unknown.answer
        messages.append(("user", question))
        if rng.random() < 0.8:
            called = rng.choices(tools, k=rng.choice((1, 1, 1, 2)))
            messages += self._draw_calls([tool["function"] for tool in called])
        given = render_chat(self._tokenizer, messages)
        learned = render_chat(self._tokenizer, [("assistant", answer)])
        weights = [0.0] * len(given.weights) + learned.weights
        return Document(given.token_ids + learned.token_ids, weights)

    def _draw_tool(self) -> dict[str, Any]:
        """Returns a function with one to three parameters, as an agent describes it."""
        rng = self._rng
        verb, noun, *names = rng.sample(self._unfamiliar, rng.randint(3, 5))
        kinds: list[dict[str, Any]] = [
            {"enum": rng.sample(self._unfamiliar, 2), "type": "string"},
            {"type": "string"},
            {"type": "integer"},
        ]
        parameters = {
            "properties": {name: rng.choice(kinds) for name in names},
            "required": names,
            "type": "object",
        }
        described = {"name": f"{verb}_{noun}", "description": f"Makes the {noun} {verb}."}
        return {"type": "function", "function": {**described, "parameters": parameters}}

    def _draw_calls(self, functions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Returns a turn that calls functions, and what each gave."""
        rng = self._rng
        calls, results = "", []
        for function in functions:
            arguments = {
                name: rng.randint(0, 99)
                if kind["type"] == "integer"
                else rng.choice(kind.get("enum", self._unfamiliar))
                for name, kind in function["parameters"]["properties"].items()
            }
            call = json.dumps({"name": function["name"], "arguments": arguments})
            calls += f"\n<tool_call>\n{call}\n</tool_call>"
            result = " ".join(rng.choices(self._unfamiliar, k=2))
            results.append(("user", f"<tool_response>\n{result}\n</tool_response>"))
        return [("assistant", calls), *results]

    def _draw_prose(self) -> Document:
        end = special_id(self._tokenizer, END_OF_TEXT)
        token_ids = [*self._tokenizer.encode(self._rng.choice(self._prose)).ids, end]
        return Document(token_ids, [PROSE_WEIGHT] * len(token_ids))

    def batch(
        self, rows: int, length: int, *, one_document: bool = False, of_agents: bool = False
    ) -> Batch:
        """Rows of packed documents that do not see one another, or of one long chat each.
        `of_agents`: the documents are chats with tools."""
        drawn: list[list[Document]] = []
        for _ in range(rows):
            row: list[Document] = []
            while sum(len(document.token_ids) for document in row) < length + 1:
                if one_document:
                    row.append(self.conversation(length + 1, fill=True))
                elif of_agents:
                    row.append(self.agent_conversation())
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
