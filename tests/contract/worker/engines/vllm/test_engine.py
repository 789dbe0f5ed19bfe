"""vLLM's engine keeps what this project's own engine keeps: the same tokens, ends and figures."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shared.prefixes import PREFIX_STEP, digests_of_prompt
from shared.text.grammar_compiler import FIRST_CPU_SECONDS
from tests.contract.worker.engines.vllm.engine_checks import Requests, run
from tests.support.vllm_environment import vllm_python
from tests.support.vllm_runs import run_in_vllm
from worker.engine.engine import Engine
from worker.engine_options import EngineOptions
from worker.settings import DEMO_CHECKPOINT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]

PROGRAM = Path(__file__).with_name("engine_checks.py")
BLOCK = 32
CONTEXT = 256
OPTIONS: dict[str, Any] = {
    "checkpoint": str(DEMO_CHECKPOINT),
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": CONTEXT,
    "max_num_seqs": 4,
    "num_kv_blocks": 20,
    "block_size": BLOCK,
    "num_threads": 1,
}
OF_VLLM: dict[str, Any] = {
    "engine": "vllm",
    "vllm_args": '{"enforce_eager": true}',
    "kv_cache_memory_gb": 0.1,
}
PROMPT = [(7 * i) % 500 + 5 for i in range(40)]
OTHER = [(11 * i) % 500 + 5 for i in range(40)]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12}
SEEDED: dict[str, Any] = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "max_tokens": 12}

# Each mask takes longer than the one before.
AMBIGUOUS: Requests = {
    "ambiguous": {
        **GREEDY,
        "max_tokens": 200,
        "ignore_eos": True,
        "grammar": ["lark", "start: s\ns: s s | /[a-z ]/\n"],
        "tenant": "slow",
    },
    "beside": GREEDY,
}
SAMPLED: Requests = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "negative seed": {**SEEDED, "seed": -(2**63)},
    "cut": {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "nothing but the best": {**SEEDED, "top_p": 0.0},
    "penalised": {
        **SEEDED,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.3,
    },
    "biased": {**GREEDY, "logit_bias": {"201": -100.0, "77": 3.5}},
    "to the end of the context": {**GREEDY, "max_tokens": 1000, "ignore_eos": True},
    "one token": {**GREEDY, "max_tokens": 1},
    "no token": {**GREEDY, "max_tokens": 0},
    "scored": {**GREEDY, "max_tokens": 0, "prompt_logprobs": 3},
    "scored and continued": {**SEEDED, "max_tokens": 3, "prompt_logprobs": 0},
    "scored before": {**SEEDED, "max_tokens": 3, "prompt_logprobs": 2, "scores_prompt": False},
    "with log probabilities": {**SEEDED, "logprobs": 5, "max_tokens": 4},
    "of edited logits": {**SEEDED, "logprobs": 2, "logit_bias": {"201": 2.0}, "max_tokens": 4},
}


class Vllm:
    """One start of vLLM, and what it did."""

    def __init__(self, options: dict[str, Any], runs: dict[str, Requests], **more: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            plan, results = Path(folder, "plan"), Path(folder, "results")
            plan.write_text(
                json.dumps({"options": {**OPTIONS, **OF_VLLM, **options}, "runs": runs, **more})
            )
            self.stderr = run_in_vllm(
                [str(PROGRAM), str(plan), str(results)],
                EngineOptions(checkpoint="", engine="vllm", engine_python=vllm_python() or ""),
                {"HF_HUB_OFFLINE": "1"},
            ).stderr
            self.results = json.loads(results.read_text())


def reference(runs: dict[str, Requests]) -> dict[str, Any]:
    """What this project's own engine does, as JSON has it."""
    from worker.model.build import build_model

    built = build_model(EngineOptions(**OPTIONS, cpu_tier="reference"))
    engine = Engine(built.engine_config, built.runner)
    found = {name: run(engine, requests) for name, requests in runs.items()}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def resumed(whole: dict[str, Any]) -> Requests:
    """Requests that continue each sampled output after some of its tokens."""
    requests: Requests = {}
    for name in ("greedy", "seeded", "cut", "penalised", "biased"):
        for known in (1, 7):
            tokens = whole[name]["tokens"][:known]
            requests[f"{name} after {known}"] = {**SAMPLED[name], "output_token_ids": tokens}
    return requests


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    found = reference({"sampled": SAMPLED})
    sampled = found["sampled"]
    ends: Requests = {
        "stop token": {**SEEDED, "stop_token_ids": [sampled["seeded"]["tokens"][4]]},
        "stop token held back": {
            **SEEDED,
            "stop_token_ids": [sampled["seeded"]["tokens"][4]],
            "min_tokens": 9,
        },
        "ended on arrival": {
            **SEEDED,
            "stop_token_ids": [sampled["seeded"]["tokens"][4]],
            "output_token_ids": sampled["seeded"]["tokens"][:5],
        },
        "full on arrival": {**SEEDED, "output_token_ids": sampled["seeded"]["tokens"]},
        "end of sequence": {
            **GREEDY,
            "logit_bias": {"2": 100.0},
        },
        "end of sequence ignored": {**GREEDY, "logit_bias": {"2": 100.0}, "ignore_eos": True},
        "end of sequence held back": {**GREEDY, "logit_bias": {"2": 100.0}, "min_tokens": 3},
    }
    runs = {"ends": ends, "resumed": resumed(sampled)}
    return {**found, **reference(runs), "plan": {"sampled": SAMPLED, **runs}}


CROWD: Requests = {
    f"r{i}": {
        "prompt": [(i * 13 + 7 * k) % 500 + 5 for k in range(60)],
        "temperature": 1.0,
        "seed": i,
        "max_tokens": 150,
        "ignore_eos": True,
    }
    for i in range(6)
}
REFUSED: Requests = {
    "too long": {**GREEDY, "prompt": [5] * CONTEXT},
    "empty": {**GREEDY, "prompt": []},
    "outside the vocabulary": {**GREEDY, "prompt": [5, 4096]},
    "negative": {**GREEDY, "prompt": [-1]},
    "biased outside": {**GREEDY, "logit_bias": {"4096": 1.0}},
    "without a seed": {**GREEDY, "temperature": 1.0},
}
SHARED: Requests = {"first": {**GREEDY, "prompt": OTHER, "tenant": "a"}}
AGAIN: Requests = {
    "same tenant": {**GREEDY, "prompt": OTHER, "tenant": "a"},
    "another tenant": {**GREEDY, "prompt": OTHER, "tenant": "b"},
}
LONG = [[(17 * i + k) % 500 + 5 for k in range(150)] for i in range(6)]


def long(number: int, tenant: str = "a") -> Requests:
    """One prompt with a prefix that is reported."""
    return {"only": {**GREEDY, "prompt": LONG[number], "max_tokens": 2, "tenant": tenant}}


# Of 20 blocks each takes five, of which four are found: 128 tokens.
REPORTED = {
    **{f"long {number}": long(number) for number in range(3)},
    "long 0 of another": long(0, "b"),
    "long 3": long(3),
    "long 4": long(4),
    "long 4 again": long(4),
    "long 0 again": long(0),
}


@pytest.fixture(scope="module")
def theirs(ours: dict[str, Any]) -> dict[str, Any]:
    runs = {
        **REPORTED,
        "shared": SHARED,
        "again": AGAIN,
        **ours["plan"],
        "crowd": CROWD,
        "ambiguous": AMBIGUOUS,
        "refused": REFUSED,
    }
    started = Vllm({}, runs, cancel=PROMPT)
    return {**started.results, **started.results["runs"], "stderr": started.stderr}


def ends_of(found: dict[str, Any]) -> dict[str, Any]:
    return {name: (one["tokens"], one["end"], one["stop"]) for name, one in found.items()}


@pytest.mark.promise(
    "vLLM: tokens, ends and log probabilities are those of this project's engine, however they are "
    "sampled"
)
def test_every_way_of_sampling_gives_our_engines_tokens(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert ends_of(theirs["sampled"]) == ends_of(ours["sampled"])
    assert len({tuple(one["tokens"]) for one in ours["sampled"].values()}) > 7, "they differ"


def test_outputs_end_where_our_engine_ends_them(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    assert ends_of(theirs["ends"]) == ends_of(ours["ends"])
    assert {one["end"] for one in ours["ends"].values()} == {"stop", "length"}


@pytest.mark.promise(
    "vLLM: an output that is cut continues as if it had not been; where it does not, the model and "
    "its jobs report it"
)
def test_a_resumed_output_continues_as_if_it_had_not_been_cut(theirs: dict[str, Any]) -> None:
    for name, found in theirs["resumed"].items():
        whole, _, known = name.partition(" after ")
        expected = theirs["sampled"][whole]
        assert found["tokens"] == expected["tokens"][int(known) :], name
        assert (found["end"], found["stop"]) == (expected["end"], expected["stop"])


def close(ours: Any, theirs: Any) -> bool:
    """Whether nested numbers are equal but for what another order of summing up changes."""
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    return bool(ours == pytest.approx(theirs, abs=2e-4))


def test_log_probabilities_are_those_of_our_engine(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    for name in ("with log probabilities", "of edited logits"):
        expected = ours["sampled"][name]["logprobs"]
        assert len(expected) == 4
        assert close(expected, theirs["sampled"][name]["logprobs"]), name


def test_prompts_are_scored_as_by_our_engine(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in ("scored", "scored and continued"):
        expected = ours["sampled"][name]["scores"]
        assert len(expected) == len(PROMPT) - 1
        assert close(expected, theirs["sampled"][name]["scores"]), name
    assert theirs["sampled"]["scored before"]["scores"] == []


@pytest.mark.promise("vLLM: prefixes are found within a tenant alone")
def test_a_tenants_prefix_is_found_by_itself_alone(theirs: dict[str, Any]) -> None:
    assert theirs["shared"]["first"]["cached"] == 0
    assert theirs["again"]["same tenant"]["cached"] == len(OTHER) // BLOCK * BLOCK
    assert theirs["again"]["another tenant"]["cached"] == 0
    assert theirs["stats"]["prefix_hit_tokens"] >= len(OTHER) // BLOCK * BLOCK


@pytest.mark.promise("vLLM: a worker reports the prefixes that its cache holds, as they change")
def test_prefixes_are_reported_that_a_later_prompt_finds(theirs: dict[str, Any]) -> None:
    held: set[str] = set()
    was_found = {True: 0, False: 0}
    for name, requests in REPORTED.items():
        prompt, tenant = requests["only"]["prompt"], requests["only"]["tenant"]
        digest = digests_of_prompt(tenant, prompt).hex()
        cached = theirs[name]["only"]["cached"]
        assert (cached >= PREFIX_STEP) is (digest in held), name
        was_found[digest in held] += 1
        for changed, is_held in theirs["prefixes"][name]:
            (held.add if is_held else held.remove)(changed)
        assert digest in held, name
    assert was_found == {True: 1, False: 7}
    assert len(held) < 6, "some of the six are lost: they do not fit"


def test_preempted_requests_give_every_token_once(theirs: dict[str, Any]) -> None:
    assert theirs["stats"]["preemptions"] > 0, "six of 210 tokens do not fit 640 places"
    expected = reference({"crowd": CROWD})["crowd"]
    assert ends_of(theirs["crowd"]) == ends_of(expected)


@pytest.mark.promise(
    "vLLM: requests that cannot run are refused with the codes of this project's engine"
)
def test_what_cannot_run_is_refused_with_our_codes(theirs: dict[str, Any]) -> None:
    codes = {name: found["error"][0] for name, found in theirs["refused"].items()}
    assert codes == {
        "too long": "context_length_exceeded",
        "empty": "payload_invalid",
        "outside the vocabulary": "payload_invalid",
        "negative": "payload_invalid",
        "biased outside": "payload_invalid",
        "without a seed": "payload_invalid",
    }


@pytest.mark.promise(
    "vLLM: a cancel frees its blocks before the next step; preempted requests give every token once"
)
def test_a_cancel_frees_the_blocks_at_once(theirs: dict[str, Any]) -> None:
    before, both, alone, after = theirs["cancel"]["stats"]
    total = before["total_blocks"]
    assert (before["free_blocks"], before["running"]) == (total, 0)
    assert (both["running"], both["waiting"]) == (2, 0)
    held = total - both["free_blocks"]
    assert held >= 2
    assert total - alone["free_blocks"] < held, "of the cancelled one nothing is held"
    assert (alone["running"], theirs["cancel"]["names"]) == (1, ["two"])
    assert (after["free_blocks"], after["running"]) == (total, 0)
    assert theirs["cancel"]["is_idle"]


def test_a_step_that_raises_ends_the_process_as_its_cause_asks(theirs: dict[str, Any]) -> None:
    bug, device = theirs["failing"]
    assert bug == "RuntimeError a bug"
    assert device.startswith("EngineFailed RuntimeError: CUDA error: out of memory")


def test_figures_are_of_this_model(theirs: dict[str, Any]) -> None:
    ready, stats = theirs["ready"], theirs["stats"]
    assert ready["config"]["num_blocks"] == stats["total_blocks"] == OPTIONS["num_kv_blocks"]
    assert ready["config"]["block_size"] == BLOCK
    assert ready["config"]["max_model_len"] == CONTEXT
    assert (ready["vocab_size"], ready["dtype"]) == (4096, "float32")
    assert ready["num_parameters"] > 700_000
    assert ready["exact_resume"] is True
    assert stats["generated_tokens"] > 6 * 150
    assert 0 < stats["cached_blocks"] <= stats["free_blocks"]


def test_a_request_tells_its_times_and_the_engine_its_steps(theirs: dict[str, Any]) -> None:
    queued_s, prefill_s, decode_s = theirs["times"]
    assert 0 <= queued_s < 60
    assert 0 < prefill_s < 60
    assert 0 < decode_s < 60, "seven more tokens"
    assert theirs["stats"]["prefix_query_tokens"] > theirs["stats"]["prefix_hit_tokens"] > 0
    for name in ("sequences", "tokens"):
        counts, total = theirs["measures"][name]
        assert 0 < sum(counts) <= theirs["stats"]["step"]
        assert total > sum(counts), "more than one in most of its steps"


def test_the_first_requests_compile_nothing(theirs: dict[str, Any]) -> None:
    """Scored prompts, log probabilities, filters and grammars were used once before ready."""
    before, after = theirs["graphs"]
    assert before > 0, "vLLM compiles the ranks of log probabilities"
    assert after == before


def test_loading_is_reported_by_its_stages(theirs: dict[str, Any]) -> None:
    stages = [stage for stage, _ in theirs["stages"]]
    names = list(dict.fromkeys(stages))
    assert names[:2] == ["importing vLLM", "loading weights"]
    assert "allocating KV cache" in names
    assert "Loading safetensors" not in theirs["stderr"], "the bar became progress"


def test_two_processes_of_one_model_give_the_tokens_of_one(theirs: dict[str, Any]) -> None:
    names = ("greedy", "penalised", "with log probabilities")
    requests = {name: SAMPLED[name] for name in names}
    started = Vllm({"tensor_parallel_size": 2}, {"sampled": requests})
    found = started.results["runs"]["sampled"]
    assert ends_of(found) == {name: ends_of(theirs["sampled"])[name] for name in names}
    logprobs = theirs["sampled"]["with log probabilities"]["logprobs"]
    assert close(logprobs, found["with log probabilities"]["logprobs"])


FREE_RUN: Requests = {
    "greedy": GREEDY,
    "cut": {**SEEDED, "top_k": 3, "top_p": 0.9, "ignore_eos": True},
    "sampled": {**SEEDED, "stop_token_ids": [201], "logprobs": 2},
    "object": {**GREEDY, "max_tokens": 30, "grammar": ["regex", "[ab]{3}"]},
}


def test_an_ambiguous_grammar_ends_its_request_alone(theirs: dict[str, Any]) -> None:
    assert_ended_alone(theirs["ambiguous"], theirs, theirs["mask_s"])


def assert_ended_alone(
    found: dict[str, Any], other: dict[str, Any], mask_s: dict[str, float]
) -> None:
    code, message = found["ambiguous"]["error"]
    assert code == "grammar_failed"
    assert "in only one way" in message
    assert 0 < len(found["ambiguous"]["tokens"]) < 200
    assert found["beside"]["tokens"] == other["sampled"]["greedy"]["tokens"]
    assert mask_s["slow"] >= FIRST_CPU_SECONDS, "they are charged to its tenant"


def test_vllms_own_sampler_keeps_to_the_limits(ours: dict[str, Any]) -> None:
    started = Vllm({"vllm_sampler": "vllm"}, {"free": FREE_RUN, "ambiguous": AMBIGUOUS})
    results = started.results
    assert_ended_alone(results["runs"]["ambiguous"], ours, results["mask_s"])
    found = started.results["runs"]["free"]
    assert started.results["ready"]["exact_resume"] is False
    assert found["greedy"]["tokens"] == ours["sampled"]["greedy"]["tokens"]
    assert (len(found["cut"]["tokens"]), found["cut"]["end"]) == (12, "length")
    assert len(found["sampled"]["logprobs"]) == len(found["sampled"]["tokens"])
    assert (found["object"]["end"], found["object"]["error"]) == ("stop", None)
