"""Checks of the model's files, without loading or fetching them."""

from __future__ import annotations

import json
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
from worker.checkpoint import gguf_refusal
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
    directory = Path(model).expanduser() if model else DEMO_CHECKPOINT
    if model and not is_directory(model):
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def check_model(model: str) -> Iterator[Finding]:
    """Yields findings about MODEL."""
    if sentence := gguf_refusal(model):
        yield wrong("model", f"{model}: {sentence}")
        return
    if model and not is_directory(model):
        yield from _check_hub(model)
        return
    directory = Path(model).expanduser() if model else DEMO_CHECKPOINT
    trouble = list(_trouble(directory))
    yield from trouble
    if not trouble:
        size = weights_bytes(model)
        yield fine("model", f"{directory} is complete; {size / 1e6:,.0f} MB of weights.")
        yield from _structured_output(directory)


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
