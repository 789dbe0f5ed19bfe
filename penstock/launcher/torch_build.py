"""Which build of PyTorch is installed: without an NVIDIA driver the one for the CPU, which is
gigabytes smaller.

    python -m penstock.launcher.torch_build torch==2.13.0

installs it with pip into this interpreter's environment. Standard library only: it runs before
anything is installed, and in images.
"""

from __future__ import annotations

import os
import shlex
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from penstock.launcher.install import install, say
from shared.cuda_devices import device_type, has_nvidia_driver

# Its builds have the versions of the default index with `+cpu` after them, which pip prefers.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOOK_S = 4.0  # for the index to answer
CPU_BYTES = 800_000_000  # of torch 2.13 and what it requires, unpacked

Say = Callable[[str], None]


def wanted_device(environ: Mapping[str, str]) -> str:
    """Returns the value of PENSTOCK_DEVICE; auto if it is not set."""
    return environ.get("PENSTOCK_DEVICE") or "auto"


def index_words(
    device: str, environ: Mapping[str, str], say: Say, index: str = CPU_INDEX
) -> list[str]:
    """Returns the pip arguments for torch that choose its build; logs which one it is.

    `device` is a setting's value. TORCH_PIP_ARGS has precedence, also where it is empty. The index
    of builds for the CPU is an extra one: what torch requires comes from wherever pip finds it.
    """
    if "TORCH_PIP_ARGS" in environ:
        return shlex.split(environ["TORCH_PIP_ARGS"])
    device = device_type(device)
    if sys.platform != "linux" or device == "cuda" or (device != "cpu" and has_nvidia_driver()):
        return []
    if fault := why_not_reached(f"{index}/torch/", environ.get("PIP_CERT")):
        say(
            f"PyTorch's index of builds for the CPU cannot be reached ({fault}): pip takes the "
            "build that it finds elsewhere, which may bring gigabytes of CUDA"
        )
        return []
    say("PyTorch's build for the CPU is installed; PENSTOCK_DEVICE=cuda chooses the one with CUDA")
    return ["--extra-index-url", index]


def why_not_reached(url: str, certificates: str | None = None) -> str:
    """Returns why `url` does not answer within LOOK_S; empty where it does."""
    faults = [f"no answer within {LOOK_S:g} s"]
    # A thread, because the look-up of a name knows no timeout.
    looking = threading.Thread(target=_look, args=(url, certificates, faults), daemon=True)
    looking.start()
    looking.join(LOOK_S)
    return faults[-1]


def _look(url: str, certificates: str | None, faults: list[str]) -> None:
    request = urllib.request.Request(url, method="HEAD")
    try:
        context = ssl.create_default_context(cafile=certificates)
        with urllib.request.urlopen(request, timeout=LOOK_S, context=context):
            faults.append("")
    except urllib.error.HTTPError as error:
        faults.append(f"status {error.code}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        faults.append(getattr(reason, "strerror", None) or str(reason) or type(error).__name__)


def main(arguments: list[str]) -> int:
    """Returns pip's exit status."""

    words = index_words(wanted_device(os.environ), os.environ, say)
    return install([*arguments, *words], "PyTorch", CPU_BYTES if CPU_INDEX in words else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
