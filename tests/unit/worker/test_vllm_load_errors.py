"""A failure to load is the model's, the settings', or one that may pass; and it is told so."""

from __future__ import annotations

import contextlib
import errno

import pytest
from safetensors import SafetensorError

from worker.engines.vllm.load_errors import (
    LoadInterrupted,
    capture_load_errors,
    load_failure,
    report_load_errors,
)
from worker.model.errors import ModelError

GPU = (
    "Free memory on device cuda:0 ({}/139.8 GiB) on startup is less than desired GPU memory "
    "utilization (0.92, {} GiB). Decrease GPU memory utilization or reduce GPU memory used by "
    "other processes."
)
CPU = (
    "Available memory on node 0 (3.1/15.2 GiB) on kv cache allocation is less than requested "
    "memory for kv ({} GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce "
    "CPU memory used by other processes."
)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EADDRINUSE, "Address already in use"),
        OSError(errno.EMFILE, "Too many open files"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        ValueError(GPU.format("20.1", "128.6")),
        ValueError(CPU.format("4.0")),
        caused(OSError("Can't load the configuration"), OSError(errno.EIO, "Input/output error")),
        caused(RuntimeError("wrapped"), OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=str,
)
def test_a_fault_that_may_pass_is_not_the_models(error: Exception) -> None:
    failure = load_failure(error)
    assert isinstance(failure, LoadInterrupted)
    assert not isinstance(failure, (ValueError, OSError)), "the engine process takes these as final"
    assert str(error)[:40] in str(failure)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Model architectures ['Unheard'] are not supported for now."),
        NotImplementedError("FP8 KV cache requires head_size divisible by 32 on CPU."),
        OSError("Can't load the configuration of '/models/x'"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "model.safetensors"),
        PermissionError(errno.EACCES, "Permission denied", "model.safetensors"),
        ValueError(CPU.format("64.0")),
        SafetensorError("Error while deserializing header: incomplete metadata"),
    ],
    ids=str,
)
def test_a_fault_of_model_or_settings_is_final(error: Exception) -> None:
    failure = load_failure(error)
    assert isinstance(failure, ModelError)
    assert "\n" not in str(failure)


def test_what_is_not_known_stays_as_it_is() -> None:
    assert load_failure(RuntimeError("CUDA out of memory")) is None
    assert load_failure(AssertionError("a shape")) is None


def test_a_missing_module_is_named_with_what_helps() -> None:
    inspected = load_failure(ValueError("failed to be inspected"), "torchvision")
    raised = load_failure(ModuleNotFoundError("No module named 'mamba_ssm'", name="mamba_ssm"))
    for failure, module in ((inspected, "torchvision"), (raised, "mamba_ssm")):
        assert isinstance(failure, ModelError)
        assert module in str(failure)
        assert "Install it" in str(failure)


def fail_like(*errors: Exception) -> None:
    """Does what vLLM does when children raise these, one after the other."""
    for error in errors:
        with contextlib.suppress(type(error)), report_load_errors():
            raise error
    raise RuntimeError("a background process failed")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no layer for these heads"), ModelError),
        (OSError(errno.ENOSPC, "No space left on device"), LoadInterrupted),
    ],
    ids=str,
)
def test_what_a_child_raised_is_raised_by_its_parent(
    error: Exception, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as raised, capture_load_errors():
        fail_like(error, ValueError("the others fail because the first has"))
    assert str(error) in str(raised.value)


def test_an_unknown_child_error_leaves_the_parents_error() -> None:
    with pytest.raises(RuntimeError, match="a background process failed"), capture_load_errors():
        fail_like(RuntimeError("a bug"))


def test_without_a_parent_that_listens_the_error_goes_on() -> None:
    with pytest.raises(ValueError, match="as it was"), report_load_errors():
        raise ValueError("as it was")
