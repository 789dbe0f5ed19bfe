"""What operators and tools ask: models, tokens, health, readiness, metrics."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.support.running_service import MODEL, RunningService, wait_until


def test_text_becomes_tokens_and_text_again(client: httpx.Client) -> None:
    text = "A gate, a wheel: <|im_start|> héllo 😀\n"
    received = client.post("/tokenize", json={"prompt": text, "model": MODEL}).json()
    assert received["count"] == len(received["tokens"])
    assert received["max_model_len"] == 512
    assert "token_strs" not in received
    back = client.post("/detokenize", json={"tokens": received["tokens"]}).json()
    assert back == {"prompt": text}
    spelled = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
    assert "".join(spelled["token_strs"]) == "abc"


def test_a_conversation_becomes_the_tokens_that_a_chat_has(
    client: httpx.Client,
    service: RunningService,
) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
    messages.append({"role": "user", "content": "hi"})
    received = client.post("/tokenize", json={"messages": messages}).json()
    client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert list(service.worker.seen[-1].job.prompt_token_ids) == received["tokens"]
    text = client.post("/detokenize", json={"tokens": received["tokens"]}).json()["prompt"]
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_client_that_renders_prompts_gets_the_template_and_the_special_tokens(
    client: httpx.Client,
) -> None:
    """As lm-eval's remote tokenizer reads it."""
    info = client.get("/tokenizer_info").json()
    assert "<|im_start|>" in info["chat_template"]
    assert info["model_max_length"] == 512
    text = info["eos_token"]
    body = {"prompt": text, "add_special_tokens": False}
    assert client.post("/tokenize", json=body).json()["count"] == 1
    assert client.get("/tokenizer_info", params={"model": MODEL}).json() == info
    assert client.get("/tokenizer_info", params={"model": "nobody"}).status_code == 404


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": []}, {"prompt": 7}, {"prompt": "a", "model": "x"}]
)
def test_a_bad_tokenize_request_is_refused(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/tokenize", json=body).status_code in (400, 404)
    assert client.post("/detokenize", json={"tokens": [10**9], **body}).status_code in (400, 404)


def test_a_chat_without_max_tokens_may_fill_the_context(
    client: httpx.Client,
    service: RunningService,
) -> None:
    client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    )
    job = service.worker.seen[-1].job
    assert job.sampling.max_tokens == 512 - len(job.prompt_token_ids)
    assert job.sampling.temperature == 1.0
    assert job.sampling.seed is not None


def test_health_counts_what_runs_and_reports_a_stalled_engine(
    client: httpx.Client,
    service: RunningService,
) -> None:
    service.script.starts = False
    with client.stream("POST", "/generate", json={"prompt": "a"}):

        def worker() -> dict[str, int]:
            return dict(client.get("/health").json()["workers"][0])

        wait_until(lambda: worker()["prefilling"] == 1, "one in prefill")
        assert client.get("/health").json()["running"] >= 1
        assert {"step", "waiting", "prefilling", "active", "pending"} <= worker().keys()
    service.script.stalled = True
    wait_until(lambda: client.get("/health").json()["status"] == "stalled", "the stall")
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 200, "requests are accepted, and wait"
    assert client.get("/ready").json()["status"] == "stalled"
    service.script.stalled = False
    wait_until(lambda: client.get("/health").json()["status"] == "ok", "the stall's end")
    assert client.head("/health").status_code == 200


def test_the_metrics_count_by_kind_model_and_outcome(
    client: httpx.Client,
    service: RunningService,
) -> None:
    client.post("/generate", json={"prompt": "abc", "stream": False})
    service.script.step_s = 0.2
    with client.stream("POST", "/generate", json={"prompt": "abc", "max_tokens": 400}) as leaving:
        next(leaving.iter_raw())
    wait_until(lambda: not len(service.app.state.open_requests), "the answer to end")
    exposed = client.get("/metrics")
    assert exposed.headers["content-type"].startswith("text/plain")
    labels = f'kind="generate",model_name="{MODEL}",prompt="short"'
    ttft = f"penstock:time_to_first_token_seconds_count{{{labels}}}"
    assert ttft in exposed.text
    assert 'penstock:disconnects_total{kind="generate"} ' in exposed.text
    assert 'penstock:requests_total{kind="generate",outcome="length"}' in exposed.text


def test_a_huge_prompt_does_not_hold_up_the_others(
    client: httpx.Client, service: RunningService
) -> None:
    """Parsed, rendered and tokenized beside the event loop: health answers meanwhile."""
    prompt = "the keeper writes the level " * 37_000
    answers: list[int] = []

    def post() -> None:
        for path, body in (
            ("/generate", {"prompt": prompt}),
            ("/tokenize", {"messages": [{"role": "user", "content": prompt}]}),
        ):
            answers.append(httpx.post(service.base_url + path, json=body, timeout=60).status_code)

    thread = threading.Thread(target=post)
    thread.start()
    num_meanwhile = 0
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        assert client.get("/health").status_code == 200
        num_meanwhile += 1
    thread.join()
    assert answers == [400, 200]
    assert num_meanwhile > 5
