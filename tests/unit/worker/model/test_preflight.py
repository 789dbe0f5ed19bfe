"""Checkpoints that are refused before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worker.engine_options import EngineOptions
from worker.model.config.model_config import FAMILIES
from worker.model.config.preflight import check_checkpoint
from worker.model.errors import ModelError

REFUSED = {
    "an unknown quantization": (
        {"quantization_config": {"quant_method": "magic"}},
        "quant_method 'magic' is unknown",
    ),
    "a quantization without a name": ({"quantization_config": {"bits": 4}}, "quant_method None"),
    "FP8 in e5m2": (
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
        "fmt 'e5m2' is not supported: FP8 weights in e4m3 are served",
    ),
    "an unknown type": ({"model_type": "nowhere"}, "model_type 'nowhere' is unknown"),
}


def made(directory: Path, config: dict[str, Any]) -> EngineOptions:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return EngineOptions(checkpoint=str(directory))


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_is_refused_by_its_configuration(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as refused:
        check_checkpoint(made(tmp_path, config))
    assert named in str(refused.value)


def test_weights_in_another_form_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not supported"):
        check_checkpoint(made(tmp_path, {}))


@pytest.mark.parametrize(
    "method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"]
)
def test_a_quantization_that_transformers_reads_is_left_to_it(tmp_path: Path, method: str) -> None:
    check_checkpoint(made(tmp_path, {"quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_native_families_are_known(tmp_path: Path, model_type: str) -> None:
    check_checkpoint(made(tmp_path, {"model_type": model_type}))


def test_every_method_of_the_installed_transformers_is_known(tmp_path: Path) -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    for method in AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - {"gguf", "gemma"}:
        check_checkpoint(made(tmp_path, {"quantization_config": {"quant_method": method}}))


def test_a_refusal_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    made(tmp_path, {"quantization_config": {"quant_method": "magic"}})
    code = (
        "import sys\n"
        "from worker.engine_options import EngineOptions\n"
        "from worker.engines.penstock import build_own_engine\n"
        "from worker.model.errors import UnsupportedModel\n"
        "try:\n"
        f"    build_own_engine(EngineOptions(checkpoint={str(tmp_path)!r}), None, None)\n"
        "except UnsupportedModel:\n"
        "    print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert printed.stdout == "[]\n"
