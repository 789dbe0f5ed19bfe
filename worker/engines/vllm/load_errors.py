"""What vLLM raises while it loads a model: a fault of model or settings, or one that may pass.

The first is final. The second is told as what it is, and whoever started the engine tries again.
What a child of vLLM's raises vLLM keeps to itself: the child tells it by a file.
Imports nothing of vLLM.
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

from worker.model.errors import ModelError, causes, may_pass

MAX_MESSAGE_CHARS = 500
# How torch says that a compiled operation was left out of a build.
_NO_KERNEL = re.compile(
    r"_C::(\w+)\(\) expected at most 0 argument|'_C' object has no attribute '(\w+)'"
)
# Free and total memory of a device, and what was asked for, in vLLM's ValueErrors.
_TOO_LITTLE_FREE = re.compile(
    r"memory on (?:device|node) .*?\([\d.]+/([\d.]+) GiB\).*? less than .*?([\d.]+) GiB\)"
)


_TOLD = "PENSTOCK_VLLM_LOAD_FAILURE"  # names the file, for the children


class LoadInterrupted(Exception):
    """vLLM could not load the model this time; the model and the settings may be in order."""


def load_failure(error: Exception, missing_module: str = "") -> Exception | None:
    """Returns what a failure to load is: ModelError, LoadInterrupted; None where that is unknown.

    `missing_module` is what vLLM could not import when it looked at the model's code.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing_module = error.name
    if missing_module:
        return ModelError(
            f"vLLM's code for this model needs the module {missing_module!r}, which is not "
            f"installed beside it. Install it for torch {torch.__version__} into the environment "
            f"of {sys.executable}, or try PENSTOCK_ENGINE=penstock"
        )
    if may_pass(error) or any(map(_lacks_memory_now, causes(error))):
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
def hearing() -> Iterator[None]:
    """Raises, in place of what is raised within it, the failure that a child has told.

    Children that start within it have a file for that.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        path = Path(folder) / "failure"
        os.environ[_TOLD] = str(path)
        try:
            yield
        except Exception as error:
            if not path.exists():
                raise
            is_final, sentence = json.loads(path.read_text(encoding="utf-8"))
            raise (ModelError if is_final else LoadInterrupted)(sentence) from error
        finally:
            del os.environ[_TOLD]


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Tells the parent what is raised within it, where `load_failure` knows it."""
    try:
        yield
    except Exception as error:
        failure = load_failure(error)
        if failure is not None and _TOLD in os.environ:
            # Others fail because the first has failed.
            with (
                contextlib.suppress(FileExistsError),
                open(os.environ[_TOLD], "x", encoding="utf-8") as file,
            ):
                json.dump([isinstance(failure, ModelError), str(failure)], file)
        raise


def sentence_of(error: Exception) -> str:
    """Returns what an exception of vLLM's says, on one line."""
    # pydantic's names the class and repeats the value around the validator's own sentence.
    details = getattr(error, "errors", None)
    text = "; ".join(str(one["msg"]) for one in details()) if callable(details) else str(error)
    text = re.sub(r"\s+", " ", text).removeprefix("Value error, ").strip()
    return text[:MAX_MESSAGE_CHARS] or type(error).__name__


def _lacks_memory_now(error: BaseException) -> bool:
    """Returns whether others hold the memory that is missing. What a whole device does not have is
    asked for by the settings."""
    found = _TOO_LITTLE_FREE.search(str(error)) if isinstance(error, ValueError) else None
    return found is not None and float(found[2]) <= float(found[1])
