"""What this project's sampler costs within vLLM, for each step, beside vLLM's own sampler.

    python -m bench.vllm_sampler [--rows 1 32 256] [--vocab 151936 49152] [--threads 1]

Starts the interpreter that PENSTOCK_VLLM_PYTHON names, as the engine process is started. There the
same rows of logits go through vLLM's Sampler twice: with this project's processor in front and
temperature 0 behind it, and with vLLM's own parameters and seeds. The rows of one batch are all of
one kind. Prints one JSON line for each kind, vocabulary and number of rows: milliseconds per step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.support.vllm_environment import vllm_python
from worker.engine_options import EngineOptions
from worker.runtime.interpreter import environment_of

PROGRAM = Path(__file__).with_name("vllm_sampler_steps.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[151_936, 49_152])
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the sampler")
    parser.add_argument("--steps", type=int, default=5, help="measured; the median is printed")
    arguments = parser.parse_args()
    python = vllm_python()
    if python is None:
        sys.exit("no interpreter with vLLM: set PENSTOCK_VLLM_PYTHON")
    env = environment_of(EngineOptions(checkpoint="", engine="vllm")) or dict(os.environ)
    program = [python, str(PROGRAM), str(arguments.threads), str(arguments.steps)]
    numbers = [",".join(map(str, each)) for each in (arguments.rows, arguments.vocab)]
    env |= {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.exit(subprocess.run([*program, *numbers], env=env, check=False).returncode)


if __name__ == "__main__":
    main()
