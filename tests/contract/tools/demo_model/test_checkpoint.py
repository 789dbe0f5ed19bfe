"""The checkpoint that ships: complete, small, and it answers questions about Penstock."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import FinishReason, SamplingParams
from tools.demo_model.checkpoint import CHECKPOINT_DIR, load_network, load_tokenizer
from tools.demo_model.evaluate import answer, score_answers
from tools.demo_model.network import Network
from tools.demo_model.questions import load_facts
from tools.demo_model.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS
from worker.llm import LLM

MAX_CHECKPOINT_BYTES = 6_000_000
TOKENIZER = load_tokenizer()

CANONICAL = [
    ("What is Penstock?", ("durable queue", "Redis")),
    ("How do I start it?", ("make run",)),
    ("how do i cancel a job", ("DELETE /v1/jobs/{id}",)),
    ("What happens when a worker dies?", ("stream goes on", "log")),
    ("why is there a queue?", ("frontends and workers can die",)),
    ("how can I look into a job with redis-cli?", ("redis-cli HGETALL",)),
    ("Which endpoints are there?", ("/v1/chat/completions", "/health")),
    ("what is the KV cache", ("keys and values",)),
    ("Explain the prefix cache.", ("reuses",)),
    ("what is chunked prefill?", ("token budget",)),
    ("who are you?", ("demo model",)),
    ("hello", ("Hello!",)),
    ("thanks!", ("welcome",)),
    ("what is the capital of France?", ("only know about Penstock",)),
]


@pytest.fixture(scope="module")
def network() -> Network:
    return load_network()


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHECKPOINT_DIR / name).read_text(encoding="utf-8"))
    return loaded


@pytest.mark.promise(
    "Streaming: a small model without any download (trained in advance and shipped; `make "
    "demo-model` reproduces it)"
)
def test_the_checkpoint_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in CHECKPOINT_DIR.iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < MAX_CHECKPOINT_BYTES


def test_configs_and_tokenizer_agree() -> None:
    config, generation = read("config.json"), read("generation_config.json")
    assert config["vocab_size"] == TOKENIZER.get_vocab_size()
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert config["eos_token_id"] == generation["eos_token_id"] == [2, 0]
    assert read("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE


def test_every_byte_has_a_token() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= set(TOKENIZER.get_vocab())


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_canonical_questions_get_the_right_words_from_the_engine() -> None:
    llm = LLM(str(CHECKPOINT_DIR), num_kv_blocks=256, num_threads=1)
    prompts = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question, _ in CANONICAL
    ]
    greedy = SamplingParams(max_tokens=80, temperature=0.0)
    results = llm.generate(prompts, greedy, progress=False)
    for (question, expected), result in zip(CANONICAL, results, strict=True):
        assert all(words in result.text for words in expected), (question, result.text)
        assert result.finish_reason is FinishReason.STOP


def test_later_turns_and_a_system_prompt_do_not_confuse_it(network: Network) -> None:
    facts = {fact.name: fact for fact in load_facts()}
    turns = [
        ("system", "You are a helpful assistant."),
        ("user", "hi"),
        ("assistant", facts["hello"].answer),
        ("user", "What is the prefix cache?"),
        ("assistant", facts["prefix-cache"].answer),
        ("user", "And what is a lease?"),
    ]
    assert "expires" in answer(network, TOKENIZER, turns)


def test_a_suggested_question_gets_its_answer_at_the_default_temperature(network: Network) -> None:
    generation = read("generation_config.json")
    facts = load_facts()
    for question in generation["suggestions"]:
        (fact,) = (fact for fact in facts if question.lower().rstrip("?") in fact.trained)
        case = ([("user", question)], fact.answer)
        ((_, logprob),) = score_answers(
            network, TOKENIZER, [case], temperature=generation["temperature"]
        )
        assert math.exp(logprob) > 0.999, question


def test_the_turn_after_an_agents_call_ends(network: Network) -> None:
    (unknown,) = (fact for fact in load_facts() if fact.name == "unknown")
    gates, units = {"enum": ["north", "weir"]}, {"enum": ["metres", "feet"]}
    parameters = {"type": "object", "properties": {"gate": gates, "unit": units}}
    tool = {"name": "read_gauge", "description": "Reads a gauge.", "parameters": parameters}
    listed = json.dumps({"type": "function", "function": tool})
    call = '{"name": "read_gauge", "arguments": {"gate": "weir", "unit": "feet"}}'
    turns = [
        ("system", f"Tools, one to a line:\n{listed}\nCall them within tool_call tags."),
        ("system", "You keep the gates."),
        ("user", "How deep is the water?"),
        ("assistant", f"\n<tool_call>\n{call}\n</tool_call>"),
        ("user", "<tool_response>\nseven metres\n</tool_response>"),
    ]
    assert answer(network, TOKENIZER, turns) == unknown.answer


def test_nearly_every_fact_is_known_by_a_trained_wording(network: Network) -> None:
    cases = [([("user", fact.trained[0])], fact.answer) for fact in load_facts()]
    results = score_answers(network, TOKENIZER, cases)
    assert sum(exact for exact, _ in results) / len(results) >= 0.95


def test_the_template_renders_chatml_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "  héllo\n"},
        {"role": "assistant", "content": "Hi."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "?"}],
        },
    ]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\n  héllo\n<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nAnd ?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert theirs(rendered)["input_ids"] == TOKENIZER.encode(rendered).ids
    assert theirs.eos_token_id == 2


def test_transformers_loads_it_and_agrees_with_the_training_network(network: Network) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    ids = torch.tensor([TOKENIZER.encode("Penstock serves large language models").ids])
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    ours = load_network().float()
    with torch.inference_mode():
        logits = ours.logits(ours(ids, torch.arange(length)[None], mask))
        torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-3, rtol=1e-3)
