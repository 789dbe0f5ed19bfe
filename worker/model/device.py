"""Chooses device and dtype; device memory, errors, and copies to and from the host."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.cuda_devices import auto_refused, device_number, has_nvidia_gpu, no_such_device
from worker.engine.errors import DeviceLost, OutOfMemory
from worker.engine_options import Dtype, KVCacheDtype
from worker.model.base import FP8
from worker.model.errors import DeviceUnavailable, ModelError

_CGROUP = Path("/sys/fs/cgroup")


def choose_device(name: str) -> torch.device:
    """Returns the device of that name. Raises DeviceUnavailable.

    "auto" is CUDA where present, and the CPU where this machine has no NVIDIA GPU: one that is lost
    or without its driver must not make a slow worker that takes jobs from fast ones. `cuda:1`
    becomes the device of the calling thread: kernels, streams and graphs are on it.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if name == "auto" and not has_nvidia_gpu(os.environ):
            return torch.device("cpu")
        if name == "auto":
            raise DeviceUnavailable(auto_refused(torch.__version__))
        raise DeviceUnavailable(f"device {name!r} was requested, but torch sees no CUDA device")
    if (number := device_number(name)) is not None:
        if number >= torch.cuda.device_count():
            raise DeviceUnavailable(no_such_device(name, torch.cuda.device_count()))
        torch.cuda.set_device(number)
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtypes(
    name: Dtype, kv_name: KVCacheDtype, stored: str, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of those names: of the parameters, and of keys and values in the cache.

    "auto" is bfloat16 on CUDA (float16 where it has none), on the CPU the checkpoint's `stored`
    one, with float32 for float16, which CPUs compute slowly; of the cache it is the parameters'.
    """
    chosen: str = name
    if name == "auto" and device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        chosen = "bfloat16" if has_bf16 else "float16"
    elif name == "auto":
        chosen = "float32" if stored == "float16" else stored
    dtypes = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    dtype = dtypes[chosen]
    return dtype, dtype if kv_name == "auto" else FP8


def available_host_bytes() -> int:
    """Returns the bytes that the machine, or its container if that has less, can still give."""
    is_reported = "SC_AVPHYS_PAGES" in os.sysconf_names  # not on macOS: half of the total
    pages = os.sysconf("SC_AVPHYS_PAGES") if is_reported else os.sysconf("SC_PHYS_PAGES") // 2
    free = pages * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text(encoding="ascii").strip()
        if text != "max":
            free = min(free, max(0, int(text) - int(used.read_text(encoding="ascii"))))
    return free


def step_failure(error: Exception, device: torch.device) -> DeviceLost | OutOfMemory | None:
    """Returns what an exception of a step means for the device; None: nothing, the step itself is
    wrong.

    A CUDA error is reported by whatever call comes next and by every later one, if it has destroyed
    the context (an illegal access, an assertion in a kernel, an uncorrectable ECC error). So the
    device is tried, whatever the exception was: one that cannot add two numbers is lost.
    """
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if is_out_of_memory(error):
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a lost device fails the next step as well
                torch.cuda.empty_cache()
        return OutOfMemory(reason)
    if device.type == "cuda":
        return None if _computes(device) else DeviceLost(reason)
    return DeviceLost(reason) if isinstance(error, torch.AcceleratorError) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that the host's or a device's memory is full."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    # The CPU's allocator, and CUDA outside torch's own, have no type for it.
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text
        or "out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


@contextlib.contextmanager
def weights_fit(device: torch.device) -> Iterator[None]:
    """Raises ModelError where memory runs out in the context."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"the weights do not fit in the memory of {device}") from error


def _computes(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
        return bool((torch.ones(1, device=device) + 1).item() == 2)
    except RuntimeError:
        return False


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Returns a copy of the array on the device, same shape and dtype, without waiting.

    For CUDA the copy goes through pinned memory, in stream order; torch keeps the pinned memory
    until the copy has happened.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy of the tensor on the host, same shape and dtype, without waiting.

    From CUDA it is filled only when the stream has come this far.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class StepTimer:
    """How long a step's work takes on its CUDA stream. On another device it does not know.

    Work that the host has to wait for in between is a part of its own: the device idles meanwhile.
    """

    __slots__ = ("_is_cuda", "_parts")

    def __init__(self, device: torch.device) -> None:
        """Marks the beginning."""
        self._is_cuda = device.type == "cuda"
        self._parts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.begin()

    def begin(self) -> None:
        """Marks the beginning of another part, after the end of the one before."""
        if self._is_cuda:
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            self._parts.append((begun, done))

    def end(self) -> None:
        """Marks the end of the part; where it was marked before, the new one counts."""
        if self._is_cuda:
            self._parts[-1][1].record()

    def wait(self) -> float | None:
        """Waits for the end, which has to be marked; returns the seconds of all parts."""
        if not self._is_cuda:
            return None
        self._parts[-1][1].synchronize()
        return sum(float(begun.elapsed_time(done)) for begun, done in self._parts) / 1000


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of this process
_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64  # of every tensor: a cache line


class HugePages:
    """Copies of tensors, one after the other in large pieces of memory.

    Without an allocation of its own, a weight of a few MiB would lie in ordinary pages. A piece
    is given back when the last tensor in it is gone. On the CPU only.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy of the same shape and dtype, aligned to 64 bytes."""
        size = tensor.numel() * tensor.element_size()
        if self._used + size > self._piece.numel():
            self._piece = huge_page_memory(max(size, _PIECE_BYTES))
            self._used = 0
        place = self._piece[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def huge_page_memory(size: int) -> Tensor:
    """Returns `size` bytes of zeros, [size] uint8, which the kernel may back with huge pages.

    They take memory as they are written. Raises OSError where the system lacks the memory.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them: ordinary pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: Tensor) -> None:
    """Has CUDA copy from and to this host memory without the host's help, until `unpin`.

    Unlike torch's pinned memory, whose size is a power of two. Raises RuntimeError.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)):
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with error {code}")


def unpin(memory: Tensor) -> None:
    """Ends `pin`, once the copies from and to the memory have been made. Raises RuntimeError."""
    torch.cuda.synchronize()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(cudart.cudaHostUnregister(memory.data_ptr())):
        raise RuntimeError(f"cudaHostUnregister failed with error {code}")
