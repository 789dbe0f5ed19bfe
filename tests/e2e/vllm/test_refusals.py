"""What ENGINE=vllm cannot run ends the worker with status 2 and one sentence that says why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from shared.process import dying_with_this_process
from tests.support.checkpoints import make_checkpoint
from tests.support.launched import REPOSITORY
from tests.support.quantised_checkpoints import FORMATS, make_quantised
from tests.support.redis_server import new_namespace, redis_url  # noqa: F401
from tests.support.variables import with_prefix
from tests.support.vllm_worker import READY_TIMEOUT_S, vllm_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

BAD_SETTINGS = 2


def unknown_architecture(directory: Path) -> Path:
    checkpoint = make_checkpoint(directory / "unheard-of")
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
    path.write_text(json.dumps(config))
    return checkpoint


def with_images(directory: Path) -> Path:
    """Returns a checkpoint whose code in vLLM imports torchvision, which its environment lacks."""
    checkpoint = make_checkpoint(directory / "images", "gemma3_text")
    path = checkpoint / "config.json"
    text = json.loads(path.read_text())
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "float32",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
    }
    path.write_text(json.dumps(config))
    return checkpoint


def cut_short(directory: Path) -> Path:
    """Returns a checkpoint whose copy was interrupted."""
    checkpoint = make_checkpoint(directory / "cut")
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return checkpoint


def without_a_tensor(directory: Path) -> Path:
    checkpoint = make_checkpoint(directory / "lacking")
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    return checkpoint


@pytest.fixture(scope="module")
def ended(
    redis_url: str,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[int, str]]]:
    """Status and log of workers that were started side by side, by what is wrong with them."""
    directory = tmp_path_factory.mktemp("refused")
    small = make_checkpoint(directory / "small")
    fp8, _ = make_quantised(directory, FORMATS["fp8"])
    wrong = {
        "name": {"MODEL": str(small), "VLLM_ARGS": '{"enforce_eagre": true}'},
        "architecture": {"MODEL": str(unknown_architecture(directory))},
        "kernel": {"MODEL": str(fp8), "DTYPE": "bfloat16"},
        "module": {"MODEL": str(with_images(directory))},
        "weights": {"MODEL": str(cut_short(directory))},
    }
    processes = {
        name: _start(redis_url, directory / f"{name}.log", settings)
        for name, settings in wrong.items()
    }
    try:
        yield {
            name: (process.wait(READY_TIMEOUT_S), (directory / f"{name}.log").read_text())
            for name, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()


def _start(redis_url: str, log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:  # noqa: F811
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "worker"],
            cwd=REPOSITORY,
            env=with_prefix(
                {
                    "PATH": os.environ["PATH"],
                    "REDIS_URL": redis_url,
                    "NAMESPACE": new_namespace(),
                    "LOG_FORMAT": "text",
                    **vllm_settings(**{"MAX_MODEL_LEN": "256", **settings}),
                }
            ),
            stdout=output,
            stderr=output,
            preexec_fn=dying_with_this_process(),
        )


@pytest.mark.promise(
    "vLLM: quantized checkpoints give the text of their full weights, or are refused by a sentence "
    "(on CPUs)"
)
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("name", "PENSTOCK_VLLM_ARGS.*enforce_eagre"),
        ("architecture", "unheard_of|UnheardOf"),
        ("kernel", "[Ff][Pp]8"),
        ("module", "torchvision.*Install it"),
        ("weights", "[Ii]ncomplete|deserializ"),
    ],
)
def test_a_worker_that_cannot_serve_says_why(
    ended: dict[str, tuple[int, str]], wrong: str, sentence: str
) -> None:
    status, log = ended[wrong]
    assert status == BAD_SETTINGS, log
    # Not the last line: what the engine's process still writes may come behind it.
    (told,) = [line for line in log.splitlines() if " CRITICAL " in line]
    assert re.search(sentence, told), log
    assert "Traceback" not in log
    assert "Unknown vLLM environment variable" not in log


@pytest.mark.long
def test_a_load_error_of_a_vllm_child_is_reported_with_its_reason(
    redis_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    args = json.dumps({"enforce_eager": True, "distributed_executor_backend": "mp"})
    path = tmp_path / "log"
    model = str(without_a_tensor(tmp_path))
    process = _start(redis_url, path, {"MODEL": model, "VLLM_ARGS": args})
    try:
        status = process.wait(READY_TIMEOUT_S)
    finally:
        process.kill()
    log = path.read_text()
    assert status == BAD_SETTINGS, log
    assert re.search(r"not initialized .*model\.norm\.weight", log.strip().splitlines()[-1]), log
