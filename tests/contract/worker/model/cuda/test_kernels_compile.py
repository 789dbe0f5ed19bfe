"""Every kernel compiles for the GPUs it is meant for, and keeps what it computes in registers.

Needs no GPU: Triton brings the assembler along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.support.triton_compile import Compiled, Variant, compile_variants

pytest.importorskip("triton")

from worker.model.base import FP8, KVLayer
from worker.model.cuda import attention
from worker.model.cuda.attention import (
    Tiles,
    TritonAttention,
    chunk_tiles,
    decode_tiles,
    invariant_tiles,
)
from worker.model.cuda.fp8 import block_tiles
from worker.model.cuda.invariant import COLUMNS, ROWS, inner_size
from worker.model.kv_cache import KVCachePool
from worker.model.layers.fp8 import BLOCK, LARGEST, LEAST_PEAK

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(600),  # of ptxas, on a machine that has other work
]

KERNELS = "worker.model.cuda.kernels"
# The shared memory that a program may have, in KiB: others are launched by none.
SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}
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


def compiled_of(variants: list[Variant]) -> Iterator[tuple[Variant, Compiled]]:
    """Yields what was compiled, which spills no register and fits in shared memory."""
    for variant, compiled in zip(variants, compile_variants(variants), strict=True):
        assert compiled.spills == 0, variant
        assert compiled.shared <= SHARED.get(variant.arch, 64) << 10, variant
        yield variant, compiled


def logits_scan(logits: str, arch: str, has_edits: bool) -> Variant:
    constants: dict[str, Any] = {"HAS_EDITS": has_edits, "BLOCK": 2048, "GROUP": 32}
    signature = {"logits": logits, **SCAN}
    return Variant(
        f"{KERNELS}.logits_scan:logits_scan", signature, constants, arch, 4, fp_fusion=False
    )


def sample_finalize(logits: str, arch: str, has_filters: bool) -> Variant:
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
    name = f"{KERNELS}.sample_finalize:sample_finalize"
    return Variant(name, signature, constants, arch, num_warps, fp_fusion=False)


def test_sampling_kernels_spill_no_register() -> None:
    variants = [
        logits_scan("*bf16", "sm_90", True),
        logits_scan("*bf16", "sm_90", False),
        logits_scan("*fp16", "sm_80", True),
        logits_scan("*fp32", "sm_80", False),
        logits_scan("*bf16", "gfx942", True),
        sample_finalize("*bf16", "sm_90", True),
        sample_finalize("*bf16", "sm_90", False),
        sample_finalize("*fp32", "sm_80", True),
    ]
    for variant, compiled in compiled_of(variants):
        threads = variant.num_warps * (64 if variant.arch.startswith("gfx") else 32)
        assert compiled.registers * threads <= 1 << 16, variant


LAYER = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16"}
STRIDES = {
    "q_stride": "i32:16",
    "q_head_stride": "i32:16",
    "key_block_stride": "i32:16",
    "key_stride": "i32:16",
    "value_block_stride": "i32:16",
    "value_stride": "i32:16",
    "out_stride": "i32:16",
    "table_stride": "i32",
}
SCORES = {
    "sinks": "*bf16",
    "scale": "fp32",
    "softcap": "fp32",
    "window": "i32",
    "chunk": "i32",
}
PLAIN = {
    "BLOCK_SIZE": 32,
    "HAS_SOFTCAP": False,
    "HAS_WINDOW": False,
    "HAS_CHUNK": False,
    "HAS_SINKS": False,
    "PRECISION": "tf32",
}


def heads(dim: int, group: int) -> dict[str, Any]:
    width = max(16, 1 << (dim - 1).bit_length())
    return {
        "GROUP": group,
        "KEY_DIM": dim,
        "VALUE_DIM": dim,
        "KEY_WIDTH": width,
        "VALUE_WIDTH": width,
    }


def attend(
    tiles: Tiles, arch: str, dim: int, group: int, is_invariant: bool = False, **changes: Any
) -> Variant:
    constants = {
        **PLAIN,
        **heads(dim, group),
        "KV_HEADS": 8,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.keys,
        "STEP": 512 if is_invariant else tiles.keys,
        "KEEPS_STEPS": is_invariant,
        **changes,
    }
    signature = {
        **LAYER,
        **dict.fromkeys(("partial", "partial_best", "partial_total"), "*fp32"),
        **dict.fromkeys(("units", "programs", "table"), "*i32"),
        **SCORES,
        "max_units": "i32",
        "num_programs": "i32",
        **STRIDES,
    }
    return Variant(
        f"{KERNELS}.attention:attention",
        signature,
        constants,
        arch,
        tiles.warps,
        tiles.stages,
        fp_fusion=not is_invariant,
    )


def decode(arch: str, dim: int, group: int, *, is_narrow: bool = False, **changes: Any) -> Variant:
    width = 1 << (dim - 1).bit_length()
    tiles = decode_tiles(group, width, torch.bfloat16, is_narrow=is_narrow)
    return attend(tiles, arch, dim, group, HAS_UNMASKED=False, **changes)


def chunks(arch: str, dim: int, group: int, *, is_narrow: bool = False, **changes: Any) -> Variant:
    width = 1 << (dim - 1).bit_length()
    tiles = chunk_tiles(group, width, torch.bfloat16, is_narrow=is_narrow)
    has_unmasked = not changes.get("HAS_WINDOW")
    return attend(tiles, arch, dim, group, HAS_UNMASKED=has_unmasked, **changes)


def whole_prompts(arch: str, dim: int, group: int, *, is_narrow: bool = False) -> Variant:
    tiles = chunk_tiles(group, dim, torch.bfloat16, is_narrow=is_narrow)
    constants = {**PLAIN, **heads(dim, group), "BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys}
    signature = {
        **LAYER,
        **dict.fromkeys(("cu_q", "seq_lens", "table"), "*i32"),
        **SCORES,
        "num_chunks": "i32",
        **STRIDES,
    }
    name = f"{KERNELS}.chunk_attention:chunk_attention"
    return Variant(name, signature, constants, arch, tiles.warps, tiles.stages)


def invariant(arch: str, dim: int, group: int, **changes: Any) -> Variant:
    width = 1 << (dim - 1).bit_length()
    tiles = invariant_tiles(group, width, torch.bfloat16)
    return attend(tiles, arch, dim, group, is_invariant=True, HAS_UNMASKED=False, **changes)


def merge(arch: str, rows_at_once: int) -> Variant:
    constants = {
        "KV_HEADS": 8,
        "GROUP": 4,
        "VALUE_DIM": 128,
        "VALUE_WIDTH": 128,
        "BLOCK_M": 16 if rows_at_once < 16 else 128,
        "ROWS": rows_at_once,
        "AT_ONCE": min(16, 64 // rows_at_once),
        "HAS_SINKS": True,
    }
    signature = {
        "out": "*bf16",
        **dict.fromkeys(("partial", "partial_best", "partial_total"), "*fp32"),
        "units": "*i32",
        "programs": "*i32",
        "sinks": "*bf16",
        "max_units": "i32",
        "num_programs": "i32",
        "out_stride": "i32:16",
    }
    name = f"{KERNELS}.attention:merge_parts"
    return Variant(name, signature, constants, arch, 4)


def plan(arch: str, **changes: Any) -> Variant:
    numbers = [
        "num_decodes",
        "num_chunks",
        "max_units",
        "num_programs",
        "num_slots",
        "window",
        "chunk",
    ]
    signature = {
        **dict.fromkeys(("units", "programs", "cu_q", "seq_lens"), "*i32"),
        **dict.fromkeys(numbers, "i32"),
    }
    constants = {
        "KV_HEADS": 8,
        "TILE_TOKENS": 32,
        "STEP": 64,
        "HAS_WINDOW": False,
        "HAS_CHUNK": False,
        "KEEPS_STEPS": False,
        "BLOCK": 1024,
        **changes,
    }
    return Variant(f"{KERNELS}.attention_plan:plan_attention", signature, constants, arch, 8)


def test_attention_spills_no_register_and_uses_the_matrix_units() -> None:
    variants = [
        decode("sm_90", 128, 4),
        decode("sm_80", 128, 2),
        decode("sm_90", 64, 7, HAS_WINDOW=True),
        decode("gfx942", 128, 4, is_narrow=True),
        invariant("sm_90", 128, 4),
        invariant("sm_90", 256, 4),
        invariant("sm_80", 128, 2, HAS_WINDOW=True, HAS_SINKS=True),
        merge("sm_90", 4),
        merge("sm_90", 16),
        merge("sm_80", 16),
        plan("sm_90"),
        plan("sm_80", HAS_WINDOW=True, KEEPS_STEPS=True),
        whole_prompts("sm_90", 128, 4),
        chunks("sm_90", 128, 4),
        chunks("sm_80", 128, 4),
        chunks("sm_90", 256, 4, HAS_WINDOW=True, HAS_SOFTCAP=True),
        *(kernel("sm_86", 128, 4) for kernel in (decode, chunks, whole_prompts)),
        decode("sm_120", 128, 4),
        *(chunks("sm_120", 128, group, is_narrow=True) for group in (4, 8)),
        whole_prompts("sm_120", 128, 4, is_narrow=True),
        chunks("gfx942", 128, 4, is_narrow=True),
    ]
    for variant, compiled in compiled_of(variants):
        check_attention(variant, compiled)


def check_attention(variant: Variant, compiled: Compiled) -> None:
    """Asserts that as many programs fit on a multiprocessor as are launched for it, and that
    wide tiles are multiplied by Hopper's own instruction."""
    rows = variant.constexprs.get("BLOCK_N") and variant.constexprs["BLOCK_M"]
    if not rows or variant.arch.startswith("gfx"):
        return
    programs = max(1, 8 // variant.num_warps)
    assert compiled.registers * variant.num_warps * 32 * programs <= 1 << 16, variant
    if variant.arch == "sm_90":
        assert compiled.shared * programs <= 227 << 10, variant
        assert ("wgmma.mma_async" in compiled.ptx) == (rows >= 64), variant


def in_float32(variant: Variant, tiles: Tiles) -> Variant:
    changes = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.keys, "PRECISION": "ieee"}
    if "STEP" in variant.constexprs:
        changes["STEP"] = tiles.keys
    signature = {k: v.replace("bf16", "fp32") for k, v in variant.signature.items()}
    constants = {**variant.constexprs, **changes}
    return replace(
        variant,
        signature=signature,
        constexprs=constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def test_wide_heads_and_float32_spill_no_register() -> None:
    variants = [
        *(chunks(arch, 256, 4) for arch in ("sm_80", "sm_86", "sm_90")),
        chunks("sm_120", 256, 4, is_narrow=True),
        in_float32(chunks("sm_120", 128, 4), chunk_tiles(4, 128, torch.float32, is_narrow=True)),
        *(decode(arch, 256, 4) for arch in ("sm_86", "sm_120")),
        in_float32(chunks("sm_90", 128, 4), chunk_tiles(4, 128, torch.float32)),
        in_float32(chunks("sm_90", 256, 4), chunk_tiles(4, 256, torch.float32)),
        in_float32(decode("sm_90", 128, 4), decode_tiles(4, 128, torch.float32)),
        in_float32(decode("sm_80", 64, 4), decode_tiles(4, 64, torch.float32)),
        in_float32(chunks("sm_86", 128, 4), chunk_tiles(4, 128, torch.float32)),
    ]
    for variant, compiled in compiled_of(variants):
        if variant.arch == "sm_90" and "tf32" in variant.constexprs.values():
            assert "wgmma.mma_async" in compiled.ptx, variant


def gemv(arch: str, rows: int, size: int, out: int, columns: int, activation: int) -> Variant:
    names = ("x", "weight", "bias", "norm_weight", "residual", "out")
    signature = {**dict.fromkeys(names, "*bf16"), "eps": "fp32"}
    constants = {
        "ROWS": rows,
        "IN": size,
        "OUT": out,
        "BLOCK_OUT": columns,
        "BLOCK_IN": 1024,
        "HAS_BIAS": False,
        "HAS_NORM": True,
        "ADDS_ONE": False,
        "HAS_RESIDUAL": True,
        "ACTIVATION": activation,
    }
    return Variant(f"{KERNELS}.gemv:gemv_kernel", signature, constants, arch, 4)


def test_products_of_few_rows_wait_for_nothing_while_they_read() -> None:
    variants = [
        gemv("sm_90", 1, 1024, 4096, 8, 0),
        gemv("sm_90", 1, 12288, 4096, 8, 0),
        gemv("sm_90", 4, 4096, 12288, 1, 1),
        gemv("sm_80", 4, 12288, 4096, 2, 0),
        gemv("gfx942", 2, 4096, 12288, 2, 1),
    ]
    for variant, compiled in compiled_of(variants):
        if variant.arch.startswith("gfx"):
            continue
        assert "ld.global.v4" in compiled.ptx, variant
        # Threads meet only where they sum up, behind the last read of weights.
        last_read = compiled.ptx.rindex("ld.global.v4")
        assert "bar.sync" not in compiled.ptx[:last_read], variant


def test_invariant_products_spill_no_register_and_use_the_matrix_units() -> None:
    constants: dict[str, Any] = {"IN": 4096, "OUT": 12288, "BLOCK_M": ROWS, "BLOCK_N": COLUMNS}
    constants |= {"BLOCK_K": inner_size(torch.bfloat16), "HAS_BIAS": True, "PRECISION": "tf32"}
    signature = {
        **dict.fromkeys(("x", "weight", "bias", "out"), "*bf16"),
        "num_rows": "i32",
        "x_stride": "i32:16",
    }
    name = f"{KERNELS}.invariant_product:invariant_product_kernel"
    variants = [Variant(name, signature, constants, arch, 4, 3) for arch in ("sm_90", "sm_80")]
    for variant, compiled in compiled_of(variants):
        if variant.arch == "sm_90":
            assert "wgmma.mma_async" in compiled.ptx, variant


ROUNDED = {"values": "*fp8e4nv", "scales": "*fp32", "input_scale": "*fp32"}
BOUNDS = {"LARGEST": LARGEST, "LEAST_PEAK": LEAST_PEAK}


def quantize(arch: str, size: int, group: int, num_warps: int, has_scale: bool = False) -> Variant:
    width = 1 << (group - 1).bit_length()
    constants = {
        "SIZE": size,
        "GROUP": group,
        "WIDTH": width,
        "GROUPS_A_PROGRAM": max(1, 1024 // width),
        "HAS_SCALE": has_scale,
        **BOUNDS,
    }
    signature = {"x": "*bf16", **ROUNDED, "x_stride": "i32:16"}
    return Variant(f"{KERNELS}.fp8:quantize_kernel", signature, constants, arch, num_warps)


def norm_rounded(arch: str, size: int, group: int, has_scale: bool = False) -> Variant:
    width = 1 << (size - 1).bit_length()
    names = ("x", "delta", "weight", "delta_weight", "summed")
    signature = {
        **dict.fromkeys(names, "*bf16"),
        "normed": "*fp8e4nv",
        **dict.fromkeys(("scales", "input_scale"), "*fp32"),
        **dict.fromkeys(("eps", "delta_eps"), "fp32"),
    }
    flags = {"HAS_DELTA": True, "HAS_DELTA_NORM": True, "ADDS_ONE": True, "HAS_SCALE": has_scale}
    constants = {"SIZE": size, "WIDTH": width, "GROUP": group, **flags, **BOUNDS}
    name = f"{KERNELS}.layers:add_norm_kernel"
    return Variant(name, signature, constants, arch, min(16, max(1, width // 512)))


def gate_rounded(arch: str, size: int, group: int, has_scale: bool = False) -> Variant:
    constants = {"SIZE": size, "GROUP": group, "BLOCK": 1024, "IS_SILU": True}
    constants |= {"HAS_SCALE": has_scale, **BOUNDS}
    name = f"{KERNELS}.layers:gate_rounded_kernel"
    return Variant(name, {"both": "*bf16", **ROUNDED}, constants, arch, 4)


def block_product(arch: str, rows: int, has_bias: bool = False) -> Variant:
    """Returns that of a layer of 4096 in, 12288 out."""
    block_m, block_n, warps, stages = block_tiles(rows)
    constants = {
        "SIZE_IN": 4096,
        "SIZE_OUT": 12288,
        "GROUP": BLOCK,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "HAS_BIAS": has_bias,
    }
    scales = dict.fromkeys(("x_scales", "weight_scales"), "*fp32")
    values = dict.fromkeys(("x", "weight"), "*fp8e4nv")
    outputs = dict.fromkeys(("bias", "out"), "*bf16")
    signature = {**values, **scales, **outputs, "num_rows": "i32"}
    name = f"{KERNELS}.fp8:block_product_kernel"
    return Variant(name, signature, constants, arch, warps, stages)


def in_fp8(variant: Variant) -> Variant:
    caches = dict.fromkeys(("keys", "values"), "*fp8e4nv")
    return replace(variant, signature={**variant.signature, **caches})


def rotate_and_store(arch: str) -> Variant:
    signature = {
        **dict.fromkeys(("qkv", "cosines", "sines", "query_weight", "key_weight"), "*bf16"),
        **dict.fromkeys(("positions", "slots"), "*i32"),
        **dict.fromkeys(("keys", "values"), "*fp8e4nv"),
        "eps": "fp32",
        "qkv_stride": "i32:16",
        **{name: kind for name, kind in STRIDES.items() if name.startswith(("key", "value"))},
    }
    constants = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF": 64, "HALF_WIDTH": 64}
    constants |= {"BLOCK_SIZE": 32, "HEADS_A_PROGRAM": 4, "HAS_NORM": True, "ADDS_ONE": False}
    return Variant(f"{KERNELS}.layers:rotate_and_store_kernel", signature, constants, arch, 2)


def test_a_cache_in_fp8_spills_no_register() -> None:
    variants = [
        in_fp8(decode("sm_90", 128, 4)),
        in_fp8(decode("sm_89", 128, 4, is_narrow=True)),
        in_fp8(decode("sm_89", 64, 7, is_narrow=True, HAS_WINDOW=True)),
        in_fp8(chunks("sm_90", 128, 4)),
        in_fp8(chunks("sm_89", 128, 4, is_narrow=True)),
        in_fp8(chunks("sm_120", 128, 4, is_narrow=True)),
        in_fp8(chunks("sm_100", 128, 4)),
        in_fp8(chunks("sm_90", 256, 4, HAS_WINDOW=True, HAS_SOFTCAP=True)),
        rotate_and_store("sm_90"),
        rotate_and_store("sm_89"),
    ]
    for variant, compiled in compiled_of(variants):
        check_attention(variant, compiled)
        if "rotate" in variant.kernel:
            assert "e4m3x2" in compiled.ptx, variant


@dataclass(frozen=True)
class OneLayer:
    kv_layers = (KVLayer(2, 128, 128),)


@pytest.mark.parametrize(
    ("dtype", "narrow", "narrow_chunks"),
    [(torch.bfloat16, set(), {12}), (FP8, {8, 12}, {8, 12})],
    ids=str,
)
def test_tiles_are_narrow_where_wide_ones_would_spill(
    dtype: torch.dtype,
    narrow: set[int],
    narrow_chunks: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those in FP8 where operands are in registers: these are capabilities without wgmma."""
    pool = KVCachePool(OneLayer(), 1, 16, device=torch.device("cpu"), dtype=dtype)
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(attention, "_capability", lambda device, major=major: major)
        backend = TritonAttention(pool)
        assert backend._is_narrow is (major in narrow)
        assert backend._has_narrow_chunks is (major in narrow_chunks)


def test_norms_and_gates_that_round_spill_no_register() -> None:
    variants = [
        *(norm_rounded(arch, 8192, 8192) for arch in ("sm_89", "sm_90", "sm_100", "sm_120")),
        norm_rounded("sm_90", 1024, 1024, has_scale=True),
        norm_rounded("sm_89", 4096, BLOCK),
        norm_rounded("sm_90", 4096, BLOCK),
        *(gate_rounded(arch, 25600, 25600) for arch in ("sm_89", "sm_90", "sm_100", "sm_120")),
        gate_rounded("sm_90", 3072, 3072, has_scale=True),
        gate_rounded("sm_89", 12288, BLOCK),
        gate_rounded("sm_90", 12288, BLOCK),
    ]
    for variant, compiled in compiled_of(variants):
        assert "e4m3x2" in compiled.ptx, variant


def test_fp8_kernels_spill_no_register_and_use_the_matrix_units() -> None:
    variants = [
        quantize("sm_90", 4096, 4096, 8),
        quantize("sm_90", 25600, 25600, 16),
        quantize("sm_90", 12288, BLOCK, 4),
        quantize("sm_90", 4096, 4096, 8, has_scale=True),
        quantize("sm_89", 12288, BLOCK, 4),
        *(block_product("sm_90", rows) for rows in (1, 64, 512)),
        block_product("sm_90", 512, has_bias=True),
        *(block_product("sm_89", rows) for rows in (1, 64, 512)),
    ]
    for variant, compiled in compiled_of(variants):
        if "product" in variant.kernel:
            unit = "wgmma.mma_async" if variant.arch == "sm_90" else "mma.sync"
            products = [line for line in compiled.ptx.splitlines() if unit in line]
            assert products, variant
            assert all("e4m3" in line for line in products if "mma" in line), variant
