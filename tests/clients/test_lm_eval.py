"""lm-evaluation-harness runs tasks of ours, with its own clients.

The service's scores are those of transformers: of the demo model, and in the harness, by its model
`hf` over the same checkpoint, of the real SmolLM2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lm_eval import client_arguments, evaluate, installed_harness
from tests.support.real_model import real_checkpoint
from tests.support.service_fixtures import processes_url
from tests.support.service_processes import MODEL
from tools.demo_model.questions import load_facts
from worker.settings import DEMO_CHECKPOINT

pytestmark = [pytest.mark.packages, pytest.mark.timeout(900)]
NUM_QUESTIONS = 8
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Austria": "Vienna",
    "Cuba": "Havana",
}
SUMS = {"1 + 2": "3", "2 + 2": "4", "3 + 4": "7", "5 + 5": "10", "6 + 3": "9"}
SUMS |= {"8 + 1": "9", "7 + 5": "12", "9 + 9": "18", "10 + 4": "14", "12 + 7": "19"}
SHOWN = "Question: What is {}?\nAnswer: {}\n\nQuestion: What is {}?\nAnswer:"
TURNS = "<|im_start|>user\n{}?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def harness() -> Path:
    return installed_harness()


COMPUTING = {"RUNNER": "model", "DEVICE": "cpu", "DTYPE": "float32"}
base_url = processes_url(lambda: DEMO_CHECKPOINT, **COMPUTING, CPU_TIER="reference")
real_url = processes_url(real_checkpoint, **COMPUTING, MAX_MODEL_LEN="1024")


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


@pytest.mark.promise(
    "Clients: lm-evaluation-harness scores multiple-choice tasks with its own client"
)
def test_a_multiple_choice_task_is_scored_as_transformers_scores_it(
    harness: Path, base_url: str, tmp_path: Path
) -> None:
    rows = questions()
    arguments = client_arguments(f"{base_url}/v1/completions", MODEL, DEMO_CHECKPOINT)
    result = evaluate(harness, "local-completions", arguments, rows, ["choose"], tmp_path)["choose"]
    assert result["score"] == 1.0
    for row, choices, sums in zip(rows, result["responses"], expected(rows), strict=True):
        assert [float(logprob) for logprob, _ in choices] == pytest.approx(sums, abs=2e-2)
        is_greedy = [str(greedy) == "True" for _, greedy in choices]
        assert is_greedy == [index == row["answer"] for index in range(4)]


def real_questions() -> list[dict[str, object]]:
    """Returns ten questions about capitals and ten sums, each behind one that has its answer."""
    capitals = {f"the capital of {country}": city for country, city in CAPITALS.items()}
    rows: list[dict[str, object]] = []
    for answers, shown in ((capitals, ("the capital of Peru", "Lima")), (SUMS, ("2 + 3", "5"))):
        others = [*answers.values()]
        for index, (asked, answer) in enumerate(answers.items()):
            wrong = [others[(index + step) % len(others)] for step in (2, 3, 5)]
            place = index % 4
            choices = [f" {other}" for other in (*wrong[:place], answer, *wrong[place:])]
            question = SHOWN.format(*shown, asked)
            rows.append({"question": question, "choices": choices, "answer": place})
    return rows


def transformers_arguments(**arguments: object) -> dict[str, object]:
    return {
        "pretrained": str(real_checkpoint()),
        "dtype": "float32",
        "device": "cpu",
        **arguments,
    }


def test_completions_of_the_real_model_score_as_transformers_does(
    harness: Path, real_url: str, tmp_path: Path
) -> None:
    rows, tasks = real_questions(), ["choose", "write"]
    arguments = client_arguments(f"{real_url}/v1/completions", MODEL, real_checkpoint())
    ours = evaluate(harness, "local-completions", arguments, rows, tasks, tmp_path)
    theirs = evaluate(harness, "hf", transformers_arguments(), rows, tasks, tmp_path)
    assert ours["write"] == theirs["write"]
    assert ours["choose"]["score"] == theirs["choose"]["score"]
    assert min(ours[task]["score"] for task in tasks) >= 0.5  # else the prompts are broken
    for mine, its in zip(ours["choose"]["responses"], theirs["choose"]["responses"], strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in its]
        assert [logprob for logprob, _ in mine] == pytest.approx(
            [logprob for logprob, _ in its], abs=1e-3
        )


def test_chat_completions_of_the_real_model_score_as_transformers_does(
    harness: Path, real_url: str, tmp_path: Path
) -> None:
    rows = real_questions()
    arguments = client_arguments(f"{real_url}/v1/chat/completions", MODEL, real_checkpoint())
    arguments["is_chat"] = True
    ours = evaluate(harness, "local-chat-completions", arguments, rows, ["write"], tmp_path)
    theirs = evaluate(
        harness, "hf", transformers_arguments(is_chat=True), rows, ["write"], tmp_path
    )
    assert ours == theirs
    assert any(response[0] for response in ours["write"]["responses"])
