"""Every tier of the CPU computes the same model, and says so when it cannot."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages import InvalidParameter, SamplingParams
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.engine_run import generate, new_engine
from tests.support.forced_logits import forced_logits
from tools.demo_model.checkpoint import CHECKPOINT_DIR, load_tokenizer
from tools.demo_model.questions import load_facts
from worker.engine_options import EngineOptions
from worker.model.build import build_model
from worker.model.config.model_config import ModelConfig
from worker.model.cpu import library as compiler
from worker.model.cpu import tiers
from worker.model.cpu.library import build, cpu_flags
from worker.model.cpu.processor import cpu_features
from worker.model.cpu.tiers import choose_tier
from worker.model.errors import ModelError, TierUnavailable
from worker.model.layers.ops import TorchOps
from worker.model.tier import TierRequest

BF16 = torch.bfloat16
VARIANTS = {
    "tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "all-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one-key-head": ("qwen2", {"num_key_value_heads": 1}),
    "wide-heads": ("qwen3", {"head_dim": 128}),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def texts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 384, length).tolist() for length in (1, 5, 16, 17, 40)]


def questions(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer()
    return [
        tokenizer.encode(
            f"<|im_start|>user\n{fact.trained[0]}?<|im_end|>\n<|im_start|>assistant\n"
        ).ids
        for fact in load_facts()[:count]
    ]


def request(path: Path, **changes: object) -> TierRequest:
    base = TierRequest(config=ModelConfig.from_directory(path), dtype=BF16, block_size=16)
    return replace(base, **changes)  # type: ignore[arg-type]


def rms(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat(tensors).square().mean().sqrt())


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[torch.Tensor]:
    return [a - b for a, b in zip(found, expected, strict=True)]


def check_against_reference(path: Path, tier: str) -> None:
    """No further from float32 than the reference is, however the texts are cut."""
    exact = forced_logits(path, texts(), tier="reference", dtype=torch.float32)
    reference = rms(errors(forced_logits(path, texts(), tier="reference"), exact))
    assert reference < 0.1 * rms(exact), "the reference itself is lost in noise"
    for chunk in (1, 7, 1 << 30):
        found = forced_logits(path, texts(), tier=tier, chunk=chunk)
        assert rms(errors(found, exact)) <= 1.2 * reference


@pytest.mark.parametrize("tier", ["packed", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_the_reference(
    family: str, tier: str, tmp_path: Path
) -> None:
    check_against_reference(make_checkpoint(tmp_path, family, dtype="bfloat16"), tier)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_a_family(name: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[name]
    path = make_checkpoint(tmp_path, family, dtype="bfloat16", **overrides)  # type: ignore[arg-type]
    check_against_reference(path, "native")


@pytest.mark.parametrize(("quantization", "most_lost"), [("int8", 0.3), ("int4", 0.6)])
@pytest.mark.parametrize("tier", ["packed", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_products_are_those_of_the_specification(
    family: str, tier: str, quantization: str, most_lost: float, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, family, dtype="bfloat16")
    exact = forced_logits(path, texts(), tier="reference", dtype=torch.float32)
    specified = forced_logits(path, texts(), tier="reference", quantization=quantization)
    found = forced_logits(path, texts(), tier=tier, quantization=quantization)
    lost = rms(errors(specified, exact))
    assert rms(errors(found, exact)) <= 1.2 * lost
    assert lost < most_lost * rms(exact)
    if quantization == "int4":  # it is four bits that were computed with
        assert rms(errors(found, specified)) < 0.5 * lost


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tier", ["packed", "native"])
def test_the_demo_model_answers_its_questions_alike(tier: str, quantization: str) -> None:
    prompts = questions(24)
    options = EngineOptions(
        checkpoint=str(CHECKPOINT_DIR), device="cpu", num_kv_blocks=512, cpu_tier="reference"
    )
    expected = generate(new_engine(build_model(options)), prompts, GREEDY)
    built = build_model(replace(options, cpu_tier=tier, quantization=quantization))
    found = generate(new_engine(built), prompts, GREEDY)
    alike = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    assert alike >= len(prompts) - (1 if quantization == "none" else 3)


def test_a_batch_gives_what_each_prompt_gives_alone() -> None:
    prompts = questions(9)
    built = build_model(
        EngineOptions(
            checkpoint=str(CHECKPOINT_DIR), device="cpu", num_kv_blocks=512, cpu_tier="native"
        )
    )
    together = generate(new_engine(built), prompts, GREEDY)
    alone = [generate(new_engine(built), [prompt], GREEDY)[0] for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_auto_takes_the_kernels_for_bfloat16_and_torch_for_float32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    assert choose_tier("auto", request(path)).name == "native"
    assert choose_tier("auto", request(path, dtype=torch.float32)).name == "reference"
    assert choose_tier("auto", request(path, block_size=32)).name == "packed"


def test_auto_falls_back_with_a_reason_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert choose_tier("auto", request(path)).name == "packed"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ModelError, match="cpu_tier 'native' is unavailable: there is no C\\+\\+"):
        choose_tier("native", request(path))


def test_a_tier_that_answers_wrongly_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(TorchOps):
        def linear(self, weight: torch.Tensor, bias: torch.Tensor | None):  # type: ignore[no-untyped-def]
            return lambda x: TorchOps().linear(weight * 1.5, bias)(x)

    class Gone(TorchOps):
        def linear(self, weight: torch.Tensor, bias: torch.Tensor | None):  # type: ignore[no-untyped-def]
            raise AttributeError("no such operator")

    path = make_checkpoint(tmp_path, "qwen3")
    for ops, reason in ((Wrong, "products are off by"), (Gone, "no such operator")):
        monkeypatch.setitem(tiers.PACKED_OPS, "none", ops)
        with pytest.raises(ModelError, match=reason):
            choose_tier("packed", request(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dtype": torch.float32}, "bfloat16"), ({"block_size": 4}, "block_size is 4")],
)
def test_native_refuses_what_it_cannot_compute(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ModelError, match=reason):
        choose_tier("native", request(path, **changes))


def test_native_refuses_sizes_that_its_vectors_do_not_divide(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", head_dim=24)
    with pytest.raises(ModelError, match="head_dim 24"):
        choose_tier("native", request(path))
    path = make_checkpoint(tmp_path / "inner", "llama", intermediate_size=100)
    with pytest.raises(ModelError, match="intermediate_size 100"):
        choose_tier("native", request(path))


def test_options_are_refused_by_name(tmp_path: Path) -> None:
    options = EngineOptions(
        checkpoint=str(make_checkpoint(tmp_path)), device="cpu", num_kv_blocks=16
    )
    for name in ("cpu_tier", "quantization"):
        with pytest.raises(InvalidParameter, match=f"{name}: must be one of .*, got 'fast'"):
            replace(options, **{name: "fast"})


def test_flags_follow_the_cpu() -> None:
    old = frozenset({"sse4_2", "avx"})
    avx2 = frozenset({"avx2", "fma"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    with pytest.raises(TierUnavailable, match="AVX2"):
        cpu_flags(old)
    assert cpu_flags(avx2 | {"avx512f"}) == ("-mavx2", "-mfma")
    assert "-mavx512bf16" not in cpu_flags(avx512)
    assert cpu_flags(avx512 | {"avx512_bf16", "avx512_vnni"})[-2:] == (
        "-mavx512bf16",
        "-mavx512vnni",
    )


def test_a_build_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n', encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = build(("-mavx2",))
    assert library.parent == tmp_path / "cache" / "penstock"
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    written = library.stat().st_mtime_ns
    assert build(("-mavx2",)) == library
    assert library.stat().st_mtime_ns == written
    assert build(("-mavx2", "-mfma")) != library
    source.write_text("no C++ at all", encoding="utf-8")
    with pytest.raises(TierUnavailable, match="failed with status 1"):
        build(("-mavx2",))
    assert not list(library.parent.glob(".building-*"))


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "kernels.cpp"
    source.write_text("", encoding="utf-8")
    shared = tmp_path / "cache" / "penstock"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    monkeypatch.setattr(compiler, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler.tempfile, "gettempdir", lambda: str(tmp_path / "own"))
    assert build(()).parent.parent == tmp_path / "own"


def test_torch_has_one_thread_beside_the_kernels_and_all_without_them() -> None:
    for tier, expected in (("native", 1), ("reference", 3)):
        build_model(
            EngineOptions(
                checkpoint=str(CHECKPOINT_DIR),
                device="cpu",
                num_kv_blocks=64,
                cpu_tier=tier,
                num_threads=3,
                dtype="bfloat16",
            )
        )
        assert torch.get_num_threads() == expected


def test_the_features_are_those_of_this_cpu() -> None:
    assert ("avx2" in cpu_features()) == torch.backends.cpu.get_cpu_capability().startswith("AVX")
