"""Measures how often the demo model gives the right answer. Run as `python -m
tools.demo_model.evaluate`.

"Exact" means that greedy decoding gives the fact's answer to the last character and then ends.
One forward pass over question and answer decides that: each token must be the most likely one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tools.demo_model.checkpoint import CHECKPOINT_DIR, load_network, load_tokenizer
from tools.demo_model.corpus import Document, pack, render_chat
from tools.demo_model.network import Network
from tools.demo_model.questions import Fact, load_facts
from tools.demo_model.rephrase import rephrase
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, special_id

_ROWS = 48  # documents in one forward pass
_MAX_ANSWER_TOKENS = 80
Turns = Sequence[tuple[str, str]]  # (role, content), the last one the user's


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a set of questions.

    `exact` is the share of answers that greedy decoding gives exactly, `sampled` the mean
    probability of the whole answer at temperature 1: the share of exact answers when they are
    sampled.
    """

    questions: int
    exact: float
    sampled: float


def score_answers(
    network: Network,
    tokenizer: Tokenizer,
    cases: Sequence[tuple[Turns, str]],
    *,
    temperature: float = 1.0,
) -> list[tuple[bool, float]]:
    """Returns for each case whether greedy decoding gives the answer, and its log probability."""
    results: list[tuple[bool, float]] = []
    for start in range(0, len(cases), _ROWS):
        documents = [_last_answer(tokenizer, *case) for case in cases[start : start + _ROWS]]
        length = max(len(document.token_ids) for document in documents)
        batch = pack([[document] for document in documents], length)
        with torch.inference_mode():
            hidden = network(batch.token_ids, batch.positions, batch.mask)
            for row in range(len(documents)):
                learned = batch.labels[row] >= 0
                labels = batch.labels[row][learned]
                logits = network.logits(hidden[row][learned]).float() / temperature
                exact = bool((logits.argmax(dim=-1) == labels).all())
                loss = functional.cross_entropy(logits, labels, reduction="sum")
                results.append((exact, -float(loss)))
    return results


def _last_answer(tokenizer: Tokenizer, turns: Turns, answer: str) -> Document:
    """Returns the conversation with only its last answer scored."""
    given = render_chat(tokenizer, turns)
    scored = render_chat(tokenizer, [("assistant", answer)])
    return Document(given.token_ids + scored.token_ids, [0.0] * len(given.weights) + scored.weights)


def answer(network: Network, tokenizer: Tokenizer, turns: Turns) -> str:
    """Returns the greedy answer of at most _MAX_ANSWER_TOKENS. Slow: without a KV cache."""
    ends = {special_id(tokenizer, TURN_END), special_id(tokenizer, END_OF_TEXT)}
    token_ids = render_chat(tokenizer, turns).token_ids
    token_ids += render_chat(tokenizer, [("assistant", "")]).token_ids[:-2]
    start = len(token_ids)
    with torch.inference_mode():
        while len(token_ids) < start + _MAX_ANSWER_TOKENS:
            length = len(token_ids)
            hidden = network(
                torch.tensor([token_ids]),
                torch.arange(length)[None],
                torch.ones(1, 1, length, length, dtype=torch.bool).tril(),
            )
            token_id = int(network.logits(hidden[0, -1]).argmax())
            if token_id in ends:
                break
            token_ids.append(token_id)
    text: str = tokenizer.decode(token_ids[start:])
    return text


def question_sets(facts: Sequence[Fact], seed: int) -> dict[str, list[tuple[Turns, str]]]:
    """Returns the named sets of the evaluation; the same seed gives the same sets."""
    rng = random.Random(seed)
    known = [fact for fact in facts if fact.name != "unknown"]
    unknown = next(fact for fact in facts if fact.name == "unknown")
    plain = [([("user", rng.choice(f.trained) + "?")], f.answer) for f in known]
    typed = [
        ([("user", rephrase(rng.choice(f.trained), rng))], f.answer) for f in known for _ in "123"
    ]
    held = [([("user", question + "?")], f.answer) for f in known for question in f.held]
    chats: list[tuple[Turns, str]] = []
    for fact in known:
        turns: list[tuple[str, str]] = []
        for earlier in rng.sample(known, 3):
            turns += [("user", rephrase(rng.choice(earlier.trained), rng))]
            turns += [("assistant", earlier.answer)]
        chats.append(([*turns, ("user", rng.choice(fact.trained) + "?")], fact.answer))
    foreign = [([("user", question + "?")], unknown.answer) for question in unknown.held]
    return {
        "as trained": [*plain],
        "freshly rephrased, with slips": [*typed],
        "fourth turn of a chat": chats,
        "held-out wordings": [*held],
        "held-out foreign questions": [*foreign],
    }


def evaluate(
    network: Network, tokenizer: Tokenizer, facts: Sequence[Fact], seed: int = 7
) -> tuple[dict[str, Score], list[tuple[str, str]]]:
    """Returns scores by set, and the held-out questions that were missed with their answers."""
    scores: dict[str, Score] = {}
    missed: list[tuple[str, str]] = []
    for name, cases in question_sets(facts, seed).items():
        results = score_answers(network, tokenizer, cases)
        exact = sum(right for right, _ in results) / len(results)
        sampled = sum(math.exp(logprob) for _, logprob in results) / len(results)
        scores[name] = Score(len(results), round(exact, 3), round(sampled, 3))
        if name.startswith("held-out"):
            for (turns, _), (right, _) in zip(cases, results, strict=True):
                if not right:
                    missed.append((turns[-1][1], answer(network, tokenizer, turns)))
    return scores, missed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.evaluate", description=__doc__
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_DIR)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--missed", action="store_true", help="show the wrong answers")
    args = parser.parse_args()
    facts = load_facts()
    network = load_network(args.checkpoint).to(getattr(torch, args.dtype))
    scores, missed = evaluate(network, load_tokenizer(args.checkpoint), facts)
    known = {fact.answer for fact in facts}
    whole = sum(given in known for _, given in missed)
    for name, score in scores.items():
        sys.stdout.write(json.dumps({"set": name, **asdict(score)}) + "\n")
    sys.stdout.write(f"of {len(missed)} held-out misses, {whole} are another fact's answer\n")
    if args.missed:
        for question, given in missed:
            mark = " " if given in known else "!"
            sys.stdout.write(f"{mark} {question} -> {given}\n")


if __name__ == "__main__":
    main()
