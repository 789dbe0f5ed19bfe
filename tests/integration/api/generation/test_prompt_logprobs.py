"""Log probabilities of the prompt as clients see them, beside transformers' own.

The worker is a process, its engine runs a tiny random model on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from shared.messages import PROMPT_SLICE_TOKENS
from tests.support.batches import batch_of
from tests.support.checkpoints import make_checkpoint
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.running_service import frontend_of_workers
from tests.support.service_processes import MODEL
from tests.support.sse_readers import payloads

PROMPT = "The keeper counts to sixty, and the water is still 🌊."
PROMPTS = ["The gate opens", "By noon the wind", "What happens in the night?"]
LONG = " ".join([PROMPT, *PROMPTS] * 24)  # several slices
BODY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
CONTEXT = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def base_url(
    redis_url: str,  # noqa: F811
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    directory, namespace = tmp_path_factory.mktemp("prompt_logprobs"), new_namespace()
    settings = {
        "MODEL": str(checkpoint),
        "RUNNER": "model",
        "DEVICE": "cpu",
        "CPU_TIER": "reference",
        "MAX_NUM_BATCHED_TOKENS": "256",
        "DRAIN_TIMEOUT_S": "1",
    }
    files = str(directory / "files")
    with frontend_of_workers(
        redis_url, namespace, directory, {MODEL: settings}, files_dir=files
    ) as frontend:
        yield frontend.base_url


class Reference:
    """What transformers says of a text."""

    def __init__(self, checkpoint: Path) -> None:
        # Seconds, which every process that collects this file would take.
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.path = checkpoint
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def token_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def logprobs(self, token_ids: Sequence[int]) -> Any:
        """[tokens, vocab]: the row of a token is of what comes behind it."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def post(base_url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{base_url}{path}", json={**BODY, **body}, timeout=60)


def answer(base_url: str, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    response = post(base_url, path, **body)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


def check_echo(
    reference: Reference, choice: dict[str, Any], prompt: str, num_top: int, num_out: int
) -> None:
    logprobs, token_ids = choice["logprobs"], reference.token_ids(prompt)
    num = len(token_ids)
    assert choice["text"].startswith(prompt)
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "text_offset")]
    assert [len(values) for values in lists] == [num + num_out] * 3
    assert logprobs["token_logprobs"][0] is None
    rows = reference.logprobs(token_ids)
    expected = [row[token_id].item() for row, token_id in zip(rows, token_ids[1:], strict=False)]
    assert logprobs["token_logprobs"][1:num] == pytest.approx(expected, abs=1e-3)
    placed = zip(logprobs["tokens"][:num], logprobs["text_offset"], strict=False)
    for token, offset in placed:
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
    if num_top == 0:
        assert logprobs["top_logprobs"] is None
        return
    assert logprobs["top_logprobs"][0] is None
    best = rows[: num - 1].max(-1).values.tolist()
    found = [max(top.values()) for top in logprobs["top_logprobs"][1:num]]
    assert found == pytest.approx(best, abs=1e-3)
    for token, value, top in zip(
        logprobs["tokens"][1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:],
        strict=True,
    ):  # fmt: skip
        assert top[token] == value, "the token itself is always among them"


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_echo_with_logprobs_scores_prompt_and_answer(
    base_url: str, reference: Reference, num_top: int
) -> None:
    answered = answer(base_url, prompt=PROMPT, echo=True, logprobs=num_top)
    (choice,) = answered["choices"]
    check_echo(reference, choice, PROMPT, num_top, num_out=4)
    plain = answer(base_url, prompt=PROMPT, logprobs=num_top)["choices"][0]
    assert choice["text"] == PROMPT + plain["text"]
    num = len(reference.token_ids(PROMPT))
    assert choice["logprobs"]["token_logprobs"][num:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert choice["logprobs"]["text_offset"][num:] == [
        len(PROMPT) + offset for offset in plain["logprobs"]["text_offset"]
    ]
    assert answered["usage"]["prompt_tokens"] == num


def test_echo_alone_computes_the_prompt_and_nothing_else(
    base_url: str, reference: Reference
) -> None:
    for logprobs in (None, 2):
        answered = answer(base_url, prompt=PROMPT, echo=True, max_tokens=0, logprobs=logprobs)
        (choice,) = answered["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert answered["usage"]["completion_tokens"] == 0
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            check_echo(reference, choice, PROMPT, 2, num_out=0)


def test_a_token_that_ends_the_answer_is_in_the_lists(base_url: str, reference: Reference) -> None:
    """As with vLLM: lm-evaluation-harness leaves out the last entry, whatever it is."""
    end = json.loads((reference.path / "generation_config.json").read_text())["eos_token_id"][0]
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1, "ignore_eos": False}
    answered = answer(base_url, **body, logit_bias={str(end): 100})
    (choice,) = answered["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert answered["usage"]["completion_tokens"] == 1
    check_echo(reference, choice, PROMPT, 1, num_out=1)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_long_prompt_comes_in_slices_and_a_stream_equals_the_whole_response(
    base_url: str, reference: Reference, max_tokens: int
) -> None:
    assert len(reference.token_ids(LONG)) > 2 * PROMPT_SLICE_TOKENS + 1
    body = {"prompt": LONG, "echo": True, "logprobs": 3, "max_tokens": max_tokens}
    (whole,) = answer(base_url, **body)["choices"]
    check_echo(reference, whole, LONG, 3, num_out=max_tokens)
    with OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model=MODEL, temperature=0, extra_body={"ignore_eos": True}, stream=True, **body
            )
        )
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(part.text for part in parts) == whole["text"]
    assert parts[0].text == LONG
    assert [part.finish_reason for part in parts][-1] == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        lists = [getattr(part.logprobs, name) for part in parts if part.logprobs is not None]
        assert list(chain.from_iterable(lists)) == whole["logprobs"][name]


def test_prompts_in_a_list_and_choices_have_each_their_own(
    base_url: str, reference: Reference
) -> None:
    body = {"echo": True, "logprobs": 1, "n": 2, "temperature": 1.0, "seed": 3}
    texts = answer(base_url, prompt=PROMPTS, **body)["choices"]
    assert [choice["index"] for choice in texts] == list(range(6))
    for index, choice in enumerate(texts):
        check_echo(reference, choice, PROMPTS[index // 2], 1, num_out=4)
    token_ids = [reference.token_ids(prompt) for prompt in PROMPTS]
    by_ids_of = answer(base_url, prompt=token_ids, **body)["choices"]
    for choice, by_ids in zip(texts, by_ids_of, strict=True):
        assert by_ids["text"] == choice["text"]
        check_echo(reference, by_ids, PROMPTS[choice["index"] // 2], 1, num_out=4)
    events = payloads(post(base_url, prompt=PROMPTS, stream=True, **body).text)
    streamed: dict[int, list[Any]] = {index: [] for index in range(6)}
    for event in events:
        for choice in event["choices"]:
            streamed[choice["index"]].append(choice)
    for index, choice in enumerate(texts):
        assert "".join(part["text"] for part in streamed[index]) == choice["text"]
        values = [
            part["logprobs"]["token_logprobs"] for part in streamed[index] if part["logprobs"]
        ]
        values, expected = list(chain.from_iterable(values)), choice["logprobs"]["token_logprobs"]
        assert values[0] is expected[0] is None
        assert values[1:] == pytest.approx(expected[1:], abs=1e-4)


def check_items(
    reference: Reference, items: list[Any], token_ids: Sequence[int], num_top: int
) -> None:
    assert items[0] is None
    assert len(items) == len(token_ids)
    rows = reference.logprobs(token_ids)
    for row, token_id, item in zip(rows, token_ids[1:], items[1:], strict=False):
        assert num_top <= len(item) <= num_top + 1
        own = item[str(token_id)]
        assert next(iter(item)) == str(token_id)
        assert own["logprob"] == pytest.approx(row[token_id].item(), abs=1e-3)
        assert own["rank"] == pytest.approx(int((row > row[token_id]).sum()) + 1, abs=2)
        assert isinstance(own["decoded_token"], str)
        ranked = sorted(item.values(), key=lambda entry: entry["rank"])[:num_top]
        best = row.topk(num_top).values.tolist()
        assert [entry["logprob"] for entry in ranked] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_have_the_shape_of_vllm(
    base_url: str, reference: Reference, num_top: int
) -> None:
    token_ids = reference.token_ids(LONG)
    params = {"prompt_logprobs": num_top}
    completion = answer(base_url, prompt=LONG, **params)
    check_items(reference, completion["choices"][0]["prompt_logprobs"], token_ids, num_top)
    chat = answer(
        base_url,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": PROMPT}],
        return_token_ids=True,
        n=2,
        **params,
    )
    check_items(reference, chat["prompt_logprobs"], chat["prompt_token_ids"], num_top)
    assert len(chat["choices"]) == 2
    body = {"prompt": token_ids, "stream": False, "max_tokens": 2, **params}
    response = httpx.post(f"{base_url}/generate", json=body, timeout=60)
    check_items(reference, response.json()["prompt_logprobs"], token_ids, num_top)


def test_both_shapes_come_together(base_url: str, reference: Reference) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "prompt_logprobs": 4, "max_tokens": 0}
    (choice,) = answer(base_url, **body)["choices"]
    check_echo(reference, choice, PROMPT, 2, num_out=0)
    token_ids = reference.token_ids(PROMPT)
    check_items(reference, choice["prompt_logprobs"], token_ids, 4)


def test_a_prompt_of_one_token_has_nothing_to_score(base_url: str) -> None:
    body = {"prompt": [300], "echo": True, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 0}
    (choice,) = answer(base_url, **body)["choices"]
    assert choice["prompt_logprobs"] == choice["logprobs"]["token_logprobs"] == [None]
    assert choice["logprobs"]["text_offset"] == [0]


def test_the_cached_prompt_is_scored_anew_and_alike(base_url: str) -> None:
    body = {"prompt": LONG, "echo": True, "logprobs": 1}
    first = answer(base_url, **body)
    answer(base_url, prompt=LONG)  # takes the blocks that the first left
    again = answer(base_url, **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == first["choices"]


def test_a_repeat_under_its_key_gets_the_same_response(base_url: str) -> None:
    def keyed() -> dict[str, Any]:
        body = {**BODY, "prompt": LONG, "echo": True, "logprobs": 2}
        response = httpx.post(
            f"{base_url}/v1/completions",
            json=body,
            headers={"Idempotency-Key": "score"},
            timeout=60,
        )
        answered: dict[str, Any] = response.json()
        return answered

    first, again = keyed(), keyed()
    assert first["id"] == again["id"]
    assert first["choices"] == again["choices"]


def test_a_job_that_scored_is_read_along_as_any_other(base_url: str) -> None:
    body = {**BODY, "prompt": LONG, "echo": True, "logprobs": 2, "on_disconnect": "continue"}
    answered = httpx.post(f"{base_url}/v1/completions", json=body, timeout=60).json()
    text = answered["choices"][0]["text"].removeprefix(LONG)
    tail = httpx.get(f"{base_url}/v1/jobs/{answered['id']}/stream").text
    events = payloads(tail)
    assert "".join(event["text"] for event in events) == text
    assert sum(len(event["token_ids"]) for event in events) == 4


def test_rows_of_a_batch_are_scored(base_url: str, reference: Reference) -> None:
    body = {**BODY, "prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 0}
    with httpx.Client(base_url=base_url, timeout=60) as client:
        line = batch_of(client, body, "output_file_id", "/v1/completions")
    check_echo(reference, line["response"]["body"]["choices"][0], LONG, 1, num_out=0)
