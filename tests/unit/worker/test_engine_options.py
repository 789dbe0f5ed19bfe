"""EngineOptions: values of another type or out of range are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shared.messages import InvalidParameter
from worker.engine_options import EngineOptions
from worker.llm import LLM

COUNTS = [
    "num_threads",
    "block_size",
    "num_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_waiting",
]
REFUSED: list[tuple[str, Any, str]] = [
    *((name, "8", "must be an integer, got '8'") for name in [*COUNTS, "lookahead"]),
    *((name, value, "must be an integer") for name in COUNTS for value in (2.0, 2.5, True, [1])),
    *((name, value, "must be at least 1, got") for name in COUNTS for value in (0, -1)),
    *((name, None, "must be an integer") for name in ("max_num_seqs", "max_waiting")),
    ("lookahead", 1.0, "must be an integer, got 1.0"),
    ("lookahead", True, "must be an integer"),
    ("lookahead", 2, "must be 0 or 1, got 2"),
    ("lookahead", -1, "must be 0 or 1, got -1"),
    ("step_target_ms", 0.5, "must be an integer"),
    ("step_target_ms", -1, "must not be negative, got -1"),
    ("echo_step_ms", -5, "must not be negative, got -5"),
    *(("echo_step_ms", value, "must be a finite number") for value in (math.nan, math.inf, "1")),
    ("echo_step_ms", None, "must be a finite number"),
    *(("kv_cache_memory_gb", value, "must be positive") for value in (0, 0.0, -1.5)),
    *(
        ("kv_cache_memory_gb", value, "must be a finite number")
        for value in (math.nan, math.inf, "2", True)
    ),
    *(
        (name, 1, "must be True or False, got 1")
        for name in ("prefix_caching", "structured_output")
    ),
    ("prefix_caching", "no", "must be True or False"),
    ("checkpoint", None, "must be text"),
    ("runner", "none", "must be one of model, echo, pooling, got 'none'"),
    *(
        ("device", value, "must be auto, cpu, cuda, or cuda:N with the number of one CUDA device")
        for value in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "cpu:0", "")
    ),
    ("dtype", ["float32"], "must be one of auto, float32"),
    ("scheduling_policy", None, "must be one of fcfs, priority, got None"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), REFUSED)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        EngineOptions(**{"checkpoint": "/m", name: value})
    assert refused.value.param == name
    assert sentence in refused.value.message


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict.fromkeys(COUNTS, 1),
        {"lookahead": 0, "step_target_ms": 0, "echo_step_ms": 0},
        {"lookahead": 1, "step_target_ms": 70, "echo_step_ms": 0.5},
        {"kv_cache_memory_gb": 2},
        {"kv_offloading_gb": 2, "kv_offloading_dir": "/kv", "kv_offloading_dir_gb": 0.5},
        {"device": "cuda:0"},
        {"device": "cuda:12"},
        {"kv_cache_memory_gb": 1e-7, "prefix_caching": False, "structured_output": False},
    ],
)
def test_bounds_are_within(options: dict[str, Any]) -> None:
    made = EngineOptions(checkpoint="/m", **options)
    assert {name: getattr(made, name) for name in options} == options


def test_an_llm_refuses_them_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidParameter, match="max_num_seqs: must be an integer, got '8'"):
        LLM("/nowhere", max_num_seqs="8")
