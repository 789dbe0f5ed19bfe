"""CUDA devices: the values of the setting DEVICE, and the number that the driver shows.

Standard library only: an installation asks before anything is installed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

DEVICE_WORDS = "auto, cpu, cuda, or cuda:N with the number of one CUDA device"

_HIDING = ("-1", "NoDevFiles")  # the latter is Slurm's, for a step without GPUs
_NUMBERED = re.compile(r"cuda:(0|[1-9]\d{0,2})")


def is_device(setting: str) -> bool:
    """Returns whether DEVICE may have this value."""
    return setting in ("auto", "cpu", "cuda") or device_number(setting) is not None


def device_number(setting: str) -> int | None:
    """Returns N of `cuda:N`, counted among the devices that the process sees; else None."""
    match = _NUMBERED.fullmatch(setting)
    return int(match[1]) if match else None


def device_type(setting: str) -> str:
    """Returns auto, cpu or cuda: `cuda:1` is cuda, an empty value is auto; others unchanged."""
    return "cuda" if device_number(setting) is not None else setting or "auto"


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the names in CUDA_VISIBLE_DEVICES, numbers or UUIDs; None if it is not set and all
    devices are visible. Those from a name on that hides devices are invisible."""
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return None
    names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return list(takewhile(lambda name: name not in _HIDING, names))


def has_nvidia_driver() -> bool:
    """Returns whether the library that the driver brings can be loaded."""
    return loads("libcuda.so.1")


def has_nvidia_gpu(environ: Mapping[str, str]) -> bool:
    """Returns whether this machine has an NVIDIA GPU, or a driver for one, that
    CUDA_VISIBLE_DEVICES does not hide."""
    is_there = any(Path("/dev").glob("nvidia[0-9]*")) or has_nvidia_driver()
    return is_there and visible_devices(environ) != []


def auto_refused(torch_version: str) -> str:
    """Returns why DEVICE=auto has no device: there is a GPU, and PyTorch does not find it."""
    return (
        "PENSTOCK_DEVICE=auto: this machine has an NVIDIA GPU or its driver, but PyTorch "
        f"{torch_version} finds no CUDA device. See what nvidia-smi reports, install a build of "
        "PyTorch for this driver, or set PENSTOCK_DEVICE=cpu"
    )


def num_cuda_devices() -> int:
    """Returns how many CUDA devices the driver shows to this process; 0 if it has no answer."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def no_such_device(setting: str, num_devices: int) -> str:
    """Returns why DEVICE is unavailable to a process that sees `num_devices` CUDA devices."""
    there = {0: "there is no CUDA device", 1: "the only CUDA device is cuda:0"}
    last = there.get(num_devices, f"the CUDA devices are cuda:0 to cuda:{num_devices - 1}")
    return f"PENSTOCK_DEVICE={setting}: {last}"


def loads(library: str) -> bool:
    """Returns whether a library of the system can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
