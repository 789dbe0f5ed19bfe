"""Requests to vLLM, llama.cpp and SGLang, and events as the first two sent them."""

from __future__ import annotations

import json

import pytest

from shared.messages import ErrorCode, Grammar, GrammarKind, SamplingParams, TokenLogprob
from worker.engine.errors import RequestRefused
from worker.engine.request import EngineRequest
from worker.engines.http.llama_server import LlamaServer
from worker.engines.http.servers import END, LENGTH, Facts, Piece, Server
from worker.engines.http.sglang_server import SglangServer
from worker.engines.http.vllm_server import VllmServer

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


def no_text(text: str) -> list[int]:
    raise AssertionError(f"{text!r} is not encoded")


def test_an_event_of_vllm_has_tokens_and_log_probabilities() -> None:
    server = VllmServer()
    event = json.loads(VLLM_EVENT)
    top = ((300, -0.5), (41, -1.5))
    assert server.reader(2, no_text)(event) == Piece((300,), (TokenLogprob(300, -0.5, top),))
    assert server.reader(1, no_text)(event).logprobs == (TokenLogprob(300, -0.5, top[:1]),)
    read = server.reader(None, no_text)
    assert read(event) == Piece((300,))
    event["choices"][0]["finish_reason"] = "abort"
    assert read(event) == Piece((300,), (), "abort")


def test_the_last_tokens_of_vllm_come_with_its_usage() -> None:
    event = json.loads(VLLM_EVENT)
    for given, reason in {"length": LENGTH, "stop": END}.items():
        read = VllmServer().reader(None, no_text)
        event["choices"][0]["finish_reason"] = given
        assert read(event) == Piece(())
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        assert read({"choices": [], "usage": usage}) == Piece((300,), (), reason, 4)
        assert read(event) == Piece(())
        assert read({"choices": [], "usage": {"prompt_tokens": 9}}) == Piece((300,), (), reason)


def test_an_event_of_llama_has_tokens_and_log_probabilities() -> None:
    server = LlamaServer()
    event = json.loads(LLAMA_EVENT)
    top = ((198, -0.01), (520, -5.25))
    assert server.reader(2, no_text)(event) == Piece((198,), (TokenLogprob(198, -0.01, top),))
    read = server.reader(None, no_text)
    assert read(event) == Piece((198,))
    assert read(json.loads(LLAMA_END % "limit")) == Piece((), (), LENGTH)
    assert read(json.loads(LLAMA_END % "eos")) == Piece((), (), END)


def test_a_character_of_several_tokens_has_them_all_from_llama() -> None:
    def encode(text: str) -> list[int]:
        assert text == "🦊"
        return [7, 8, 9]

    event = json.loads(LLAMA_EVENT) | {"content": "🦊", "tokens": [9], "tokens_predicted": 3}
    assert LlamaServer().reader(None, encode)(event) == Piece((7, 8, 9))
    entry = event["completion_probabilities"][0]
    entry["id"] = 9
    logprobs = LlamaServer().reader(0, encode)(event).logprobs
    assert logprobs == (TokenLogprob(7, 0.0), TokenLogprob(8, 0.0), TokenLogprob(9, -0.01))
    with pytest.raises(ValueError, match="4 tokens are sent as"):
        LlamaServer().reader(None, encode)(event | {"tokens_predicted": 4})


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


def test_sglang_is_asked_for_the_rest_of_a_request() -> None:
    given = request(
        (8, 9), max_tokens=10, min_tokens=4, logit_bias={3: -100.0}, stop_token_ids=(4,), logprobs=2
    )
    body = SglangServer().body(given, "m", 6, {2})
    sampling = body.pop("sampling_params")
    assert body == {
        "input_ids": [5, 6, 8, 9],
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (4, 2)
    assert sampling["stop_token_ids"] == [4, 2]
    assert sampling["logit_bias"] == {"3": -100.0}
    assert sampling["top_k"] == -1
    assert sampling["no_stop_trim"]
    assert 0 <= sampling["sampling_seed"] < 2**63
    assert (
        "sampling_seed"
        not in SglangServer().body(request(temperature=0.0), "m", 6, {2})["sampling_params"]
    )


def test_tokens_that_sglang_left_out_are_noticed() -> None:
    read = SglangServer().reader(None, no_text)
    meta = {"completion_tokens": 3, "finish_reason": None, "cached_tokens": 0}
    with pytest.raises(ValueError, match="3 new tokens are sent as 2"):
        read({"output_ids": [7, 8], "meta_info": meta})


SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}),
)
REGEX = Grammar(GrammarKind.REGEX, "a|b")
LARK = Grammar(GrammarKind.LARK, 'start: "a"')


def test_each_server_gets_the_grammars_that_it_has() -> None:
    def sent(server: Server, grammar: Grammar) -> dict[str, object]:
        return server.body(request(grammar=server.grammar(grammar)), "m", 6, {2})

    for name, grammar in {"json": SCHEMA, "regex": REGEX}.items():
        assert sent(VllmServer(), grammar)["structured_outputs"] == {name: grammar.text}
    lark = (
        f"%llguidance {{}}\n{LARK.text}"  # XGrammar refuses the line, so that vLLM uses llguidance
    )
    assert sent(VllmServer(), LARK)["structured_outputs"] == {"grammar": lark}
    assert VllmServer().grammar(Grammar(LARK.kind, lark)).text == lark
    for name, grammar in {"json_schema": SCHEMA, "regex": REGEX}.items():
        sampling = sent(SglangServer(), grammar)["sampling_params"]
        assert isinstance(sampling, dict)
        assert sampling[name] == grammar.text
    schema = sent(LlamaServer(), SCHEMA)["json_schema"]
    assert isinstance(schema, dict)
    assert schema == json.loads(SCHEMA.text)
    assert [*schema["properties"]] == ["b", "a"]  # the order in which it has them written


@pytest.mark.parametrize(
    ("server", "grammar", "sentence"),
    [
        (SglangServer(), LARK, "SGLang cannot keep an answer to a context-free grammar"),
        (LlamaServer(), LARK, "llama.cpp cannot keep an answer to a context-free grammar"),
        (LlamaServer(), REGEX, "llama.cpp cannot keep an answer to a regular expression"),
    ],
)
def test_a_grammar_that_the_server_lacks_is_refused(
    server: Server, grammar: Grammar, sentence: str
) -> None:
    with pytest.raises(RequestRefused, match=sentence) as refused:
        server.grammar(grammar)
    assert refused.value.code is ErrorCode.GRAMMAR_FAILED


def test_llama_reports_what_it_found_in_its_cache_before_the_first_token() -> None:
    progress = {"total": 9, "cache": 8, "processed": 9, "time_ms": 7}
    event = {"content": "", "tokens": [0], "tokens_predicted": 0, "prompt_progress": progress}
    read = LlamaServer().reader(None, no_text)
    assert read(event) == Piece((), num_cached_tokens=8)
    assert read(json.loads(LLAMA_EVENT)) == Piece((198,))


def test_the_facts_of_a_server_are_read() -> None:
    assert VllmServer().read_facts(
        {"version": "0.32.0"}, {"id": "m", "max_model_len": 512}
    ) == Facts("vllm 0.32.0", 512)
    props = {"default_generation_settings": {"n_ctx": 2048}, "total_slots": 4, "build_info": "b7"}
    info = {"version": "0.5.23", "internal_states": []}
    assert SglangServer().read_facts(info, {"max_model_len": 9}) == Facts("sglang 0.5.23", 9)
    assert LlamaServer().read_facts(props, {"id": "m"}) == Facts("llama.cpp b7", 2048, 4)
