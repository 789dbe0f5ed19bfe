"""lm-evaluation-harness runs a multiple-choice task of ours, with its own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lm_eval import evaluate, installed_harness
from tests.support.redis_server import new_namespace
from tests.support.service_processes import MODEL, service_processes
from tools.demo_model.questions import load_facts
from worker.settings import DEMO_CHECKPOINT

pytestmark = pytest.mark.packages
NUM_QUESTIONS = 8
TURNS = "<|im_start|>user\n{}?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def harness() -> Path:
    return installed_harness()


@pytest.fixture(scope="module")
def base_url(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory, namespace = tmp_path_factory.mktemp("lm_eval"), new_namespace()
    settings = {"RUNNER": "model", "DEVICE": "cpu", "CPU_TIER": "reference", "DTYPE": "float32"}
    with service_processes(
        redis_url, namespace, DEMO_CHECKPOINT, directory, **settings
    ) as frontend:
        yield frontend.base_url


def questions() -> list[dict[str, object]]:
    """Each with the beginning of the demo model's answer; the choices are how that goes on, and
    how three other answers go on."""
    facts = load_facts()[: 4 * NUM_QUESTIONS : 4]
    begun = [" ".join(fact.answer.split(" ")[:2]) for fact in facts]
    rests = [fact.answer.removeprefix(begin) for fact, begin in zip(facts, begun, strict=True)]
    rows = []
    for index, fact in enumerate(facts):
        wrong = [rests[(index + step) % len(facts)] for step in (1, 2, 3)]
        place = index % 4
        choices = [*wrong[:place], rests[index], *wrong[place:]]
        question = TURNS.format(fact.trained[0]) + begun[index]
        rows.append({"question": question, "choices": choices, "answer": place})
    return rows


def expected(rows: list[dict[str, object]]) -> list[list[float]]:
    """The log probability of each choice behind its question, by transformers' own forward."""
    # Seconds, which every process that collects this file would take.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    sums = []
    for row in rows:
        question, choices = row["question"], row["choices"]
        assert isinstance(choices, list)
        num_asked = len(tokenizer(question)["input_ids"])
        sums.append([])
        for choice in choices:
            token_ids = torch.tensor(tokenizer(f"{question}{choice}")["input_ids"])
            with torch.inference_mode():
                logprobs = model(token_ids[None]).logits[0].log_softmax(-1)
            own = logprobs[num_asked - 1 : -1].gather(1, token_ids[num_asked:, None])
            sums[-1].append(own.sum().item())
    return sums


def test_a_multiple_choice_task_is_scored_as_transformers_scores_it(
    harness: Path, base_url: str, tmp_path: Path
) -> None:
    rows = questions()
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = evaluate(harness, base_url, MODEL, DEMO_CHECKPOINT, file, tmp_path)
    assert result["acc"] == 1.0
    for row, choices, sums in zip(rows, result["choices"], expected(rows), strict=True):
        assert [float(logprob) for logprob, _ in choices] == pytest.approx(sums, abs=2e-2)
        is_greedy = [str(greedy) == "True" for _, greedy in choices]
        assert is_greedy == [index == row["answer"] for index in range(4)]
