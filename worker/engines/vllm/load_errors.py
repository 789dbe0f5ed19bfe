"""Classifies errors of loading a model in vLLM: final (model or settings) or transient.

After a transient error the engine is started again. vLLM does not pass on the errors of its child
processes: a child writes its error to a file. Imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError

from worker.model.errors import ModelError, causes, is_transient

MAX_MESSAGE_CHARS = 500
# torch's message if a build lacks a compiled operation.
_NO_KERNEL = re.compile(
    r"_C::(\w+)\(\) expected at most 0 argument|'_C' object has no attribute '(\w+)'"
)
# Free, total and requested memory of a device, in vLLM's ValueErrors.
_TOO_LITTLE_FREE = re.compile(
    r"memory on (?:device|node) .*?\([\d.]+/([\d.]+) GiB\).*? less than .*?([\d.]+) GiB\)"
)


_FILE_VARIABLE = "PENSTOCK_VLLM_LOAD_FAILURE"  # names the file, for the children


class LoadInterrupted(Exception):
    """vLLM could not load the model this time; the model and the settings may be in order."""


def load_failure(error: Exception, missing_module: str = "") -> Exception | None:
    """Returns `error` as a ModelError (final) or LoadInterrupted (transient); None if unknown.

    `missing_module`: the module that vLLM failed to import when it inspected the model's code.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing_module = error.name
    if missing_module:
        return ModelError(
            f"vLLM's code for this model needs the module {missing_module!r}, which is not "
            f"installed beside it. Install it for torch {torch.__version__} into the environment "
            f"of {sys.executable}, or try PENSTOCK_ENGINE=penstock"
        )
    if is_transient(error) or any(map(_lacks_memory_now, causes(error))):
        return LoadInterrupted(f"vLLM could not load this model now: {sentence_of(error)}")
    if isinstance(error, (ValueError, NotImplementedError, OSError, SafetensorError)):
        return ModelError(f"vLLM cannot serve this model: {sentence_of(error)}")
    if isinstance(error, (RuntimeError, AttributeError)):
        kernel = _NO_KERNEL.search(str(error))
        if kernel is not None:
            return ModelError(
                "vLLM cannot serve this model: its build for this device has no kernel "
                f"{kernel[1] or kernel[2]}, which the model's weights need in their format"
            )
    return None


@contextlib.contextmanager
def capture_load_errors() -> Iterator[None]:
    """Replaces an error raised within it by the one that a child process has reported.

    Children that start within it have a file for their report.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        path = Path(folder) / "failure"
        os.environ[_FILE_VARIABLE] = str(path)
        try:
            yield
        except Exception as error:
            if not path.exists():
                raise
            is_final, sentence = json.loads(path.read_text(encoding="utf-8"))
            raise (ModelError if is_final else LoadInterrupted)(sentence) from error
        finally:
            del os.environ[_FILE_VARIABLE]


@contextlib.contextmanager
def report_load_errors() -> Iterator[None]:
    """Reports an error raised within it to the parent process, if `load_failure` knows it."""
    try:
        yield
    except Exception as error:
        failure = load_failure(error)
        if failure is not None and _FILE_VARIABLE in os.environ:
            # Only the first one: the others fail because of it.
            with (
                contextlib.suppress(FileExistsError),
                open(os.environ[_FILE_VARIABLE], "x", encoding="utf-8") as file,
            ):
                json.dump([isinstance(failure, ModelError), str(failure)], file)
        raise


def sentence_of(error: Exception) -> str:
    """Returns the message of an exception of vLLM's, on one line."""
    # pydantic wraps the class and the value around the validator's message.
    details = getattr(error, "errors", None)
    text = "; ".join(str(one["msg"]) for one in details()) if callable(details) else str(error)
    text = re.sub(r"\s+", " ", text).removeprefix("Value error, ").strip()
    return text[:MAX_MESSAGE_CHARS] or type(error).__name__


def _lacks_memory_now(error: BaseException) -> bool:
    """Returns whether other processes hold the missing memory; the device has enough in total."""
    found = _TOO_LITTLE_FREE.search(str(error)) if isinstance(error, ValueError) else None
    return found is not None and float(found[2]) <= float(found[1])
