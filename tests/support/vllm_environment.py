"""Where tests find an interpreter with vLLM, which no test installs."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "PENSTOCK_VLLM_PYTHON"


def vllm_python() -> str | None:
    """Returns the interpreter that PENSTOCK_VLLM_PYTHON names, else that of `.venv-vllm`, the
    build for CPUs, which `make` fills; None where there is neither."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    made = REPOSITORY / ".venv-vllm" / "bin" / "python"
    return str(made) if made.exists() else None
