"""Requests to vLLM and llama.cpp, and events as these servers sent them."""

from __future__ import annotations

import json

import pytest

from shared.messages import ErrorCode, SamplingParams, TokenLogprob
from worker.engine.errors import RequestRefused
from worker.engine.request import EngineRequest
from worker.engines.http.servers import END, Facts, LlamaServer, Piece, VllmServer

# By vLLM 0.32.0, with logprobs=2.
VLLM_EVENT = """{"id":"cmpl-1","object":"text_completion","created":1,"model":"demo","choices":[{
"index":0,"text":"Penstock","logprobs":{"text_offset":[0],"token_logprobs":[-0.5],
"tokens":["token_id:300"],"top_logprobs":[{"token_id:300":-0.5,"token_id:41":-1.5}]},
"finish_reason":null,"stop_reason":null,"token_ids":[300]}],"usage":null}"""
# By llama.cpp of October 2026, with n_probs=2.
LLAMA_EVENT = r"""{"index":0,"content":"\n","tokens":[198],"stop":false,"id_slot":-1,
"tokens_predicted":1,"tokens_evaluated":5,"completion_probabilities":[{"id":198,"token":"\n",
"bytes":[10],"logprob":-0.01,"top_logprobs":[{"id":198,"token":"\n","bytes":[10],"logprob":-0.01},
{"id":520,"token":"ass","bytes":[97,115,115],"logprob":-5.25}]}]}"""
LLAMA_END = """{"index":0,"content":"","tokens":[],"id_slot":3,"stop":true,"stop_type":"%s"}"""


def request(output: tuple[int, ...] = (), **params: object) -> EngineRequest:
    return EngineRequest(
        request_id="a",
        prompt_token_ids=(5, 6),
        params=SamplingParams(**{"seed": 7, **params}),  # type: ignore[arg-type]
        output_token_ids=output,
    )


def test_an_event_of_vllm_has_tokens_and_log_probabilities() -> None:
    server = VllmServer()
    event = json.loads(VLLM_EVENT)
    top = ((300, -0.5), (41, -1.5))
    assert server.read(event, 2) == Piece((300,), (TokenLogprob(300, -0.5, top),))
    assert server.read(event, 1).logprobs == (TokenLogprob(300, -0.5, top[:1]),)
    assert server.read(event, None) == Piece((300,))
    assert server.read({"choices": [], "usage": {}}, None) == Piece(())
    event["choices"][0]["finish_reason"] = "length"
    assert server.read(event, None).reason == "length"


def test_an_event_of_llama_has_tokens_and_log_probabilities() -> None:
    server = LlamaServer()
    event = json.loads(LLAMA_EVENT)
    top = ((198, -0.01), (520, -5.25))
    assert server.read(event, 2) == Piece((198,), (TokenLogprob(198, -0.01, top),))
    assert server.read(event, None) == Piece((198,))
    assert server.read(json.loads(LLAMA_END % "limit"), 2) == Piece((), (), "limit")
    assert server.read(json.loads(LLAMA_END % "eos"), None) == Piece((), (), END)


def test_vllm_is_asked_for_the_rest_of_a_request() -> None:
    body = VllmServer().body(
        request((8, 9), max_tokens=10, top_k=3, stop_token_ids=(4,)), "m", 6, {2}
    )
    assert body["prompt"] == [5, 6, 8, 9]
    assert body["max_tokens"] == 4
    assert body["stop_token_ids"] == [4, 2]
    assert (body["model"], body["top_k"], body["temperature"]) == ("m", 3, 1.0)
    assert body["return_token_ids"]
    assert "logprobs" not in body


def test_llama_is_asked_for_the_rest_of_a_request() -> None:
    given = request((8, 9), max_tokens=10, min_tokens=2, logit_bias={3: -100.0}, logprobs=0)
    body = LlamaServer().body(given, "m", 6, {2})
    assert body["prompt"] == [5, 6, 8, 9]
    assert body["n_predict"] == 4
    assert body["seed"] == 9
    assert body["logit_bias"] == [[3, -100.0]]
    assert body["n_probs"] == 1
    assert "seed" not in LlamaServer().body(request(temperature=0.0), "m", 6, {2})


def test_a_parameter_that_the_server_lacks_is_refused() -> None:
    with pytest.raises(RequestRefused, match="min_tokens") as refused:
        LlamaServer().body(request(max_tokens=9, min_tokens=3), "m", 6, {2})
    assert refused.value.code is ErrorCode.PAYLOAD_INVALID
    for server in (LlamaServer(), VllmServer()):
        with pytest.raises(RequestRefused, match="log probabilities of a prompt"):
            server.body(request(prompt_logprobs=1), "m", 6, {2})


def test_the_facts_of_a_server_are_read() -> None:
    assert VllmServer().read_facts(
        {"version": "0.32.0"}, {"id": "m", "max_model_len": 512}
    ) == Facts("vllm 0.32.0", 512)
    props = {"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4, "build_info": "b7"}
    assert LlamaServer().read_facts(props, {"id": "m"}) == Facts("llama.cpp b7", 2048, 4)
