"""Every kernel compiles for the GPUs it is meant for, and keeps what it computes in registers.

Needs no GPU: Triton brings the assembler along.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.support.triton_compile import Variant, compile_variants

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.timeout(600),  # of ptxas, on a machine that has other work
]

KERNELS = "worker.model.cuda.kernels"
OF_ROWS = {"row_stride": "i32:16", "ints": "*i64", "step_ints": "*i64", "floats": "*fp32"}
SCAN = {
    **OF_ROWS,
    "edit_starts": "*i32",
    "edit_tokens": "*i32",
    "edit_values": "*fp32",
    "num_edits": "i32",
    "output_counts": "*i32",
    "in_prompt": "*u8",
    "masks": "*i32",
    "num_words": "i32",
    "edited": "*fp32",
    "group_best": "*fp32",
    "found": "*fp32",
    "winners": "*i32",
    "vocab": "i32:16",
    "num_blocks": "i32",
    "num_groups": "i32",
}
CHOOSE = {
    **OF_ROWS,
    "edited": "*fp32",
    "group_best": "*fp32",
    "scratch": "*i32",
    "found": "*fp32",
    "winners": "*i32",
    "token_ids": "*i64",
    "best_logits": "*fp32",
    "vocab": "i32:16",
    "num_blocks": "i32",
    "num_groups": "i32",
}


def scan(logits: str, arch: str, has_edits: bool) -> Variant:
    constants: dict[str, Any] = {"HAS_EDITS": has_edits, "BLOCK": 2048, "GROUP": 32}
    signature = {"logits": logits, **SCAN}
    return Variant(f"{KERNELS}.scan:scan", signature, constants, arch, 4, fp_fusion=False)


def choose(logits: str, arch: str, has_filters: bool) -> Variant:
    """Returns that of a vocabulary of 151,936 tokens."""
    constants: dict[str, Any] = {
        "HAS_FILTERS": has_filters,
        "BLOCKS": 128,
        "GROUPS": 8192 if has_filters else 1,
        "GROUP": 32,
        "TILE": 128,
        "FEW": 4096,
    }
    signature = {"logits": logits, **CHOOSE}
    num_warps = 16 if has_filters else 2
    name = f"{KERNELS}.choose:choose"
    return Variant(name, signature, constants, arch, num_warps, fp_fusion=False)


def test_sampling_kernels_spill_no_register() -> None:
    variants = [
        scan("*bf16", "sm_90", True),
        scan("*bf16", "sm_90", False),
        scan("*fp16", "sm_80", True),
        scan("*fp32", "sm_80", False),
        scan("*bf16", "gfx942", True),
        choose("*bf16", "sm_90", True),
        choose("*bf16", "sm_90", False),
        choose("*fp32", "sm_80", True),
    ]
    for variant, compiled in zip(variants, compile_variants(variants), strict=True):
        assert compiled.spills == 0, variant
        threads = variant.num_warps * (64 if variant.arch.startswith("gfx") else 32)
        assert compiled.registers * threads <= 1 << 16, variant
