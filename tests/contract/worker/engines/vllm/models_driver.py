"""Loads several models into vLLM, one after the other: a program for the interpreter that has vLLM.

    python models_driver.py WORK RESULTS

Both are files of msgpack, as tests/support/vllm_runs.py has them. A model that vLLM refuses has the
sentence in place of its answers; any other failure ends the program.
"""

from __future__ import annotations

import contextlib
import gc
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec

from worker.engine_options import EngineOptions
from worker.engines.vllm.build import build_vllm_engine
from worker.model.errors import ModelError

_run = runpy.run_path(str(Path(__file__).with_name("engine_driver.py")))["run"]


def run_model(options: dict[str, Any], runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns what the model says in each run, or why it is refused. Nothing of it is left."""
    try:
        built = build_vllm_engine(
            msgspec.convert(options, EngineOptions), lambda *progress: None, lambda sentence: None
        )
    except (ModelError, ValueError) as error:
        return {"refusal": str(error), "runs": []}
    else:
        built.engine.self_test()
        return {"refusal": "", "runs": [_run(built.engine, each)["answers"] for each in runs]}


def forget_model() -> None:
    """Ends vLLM's process groups and frees what the last model held."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        cleanup_dist_env_and_memory()


def main() -> None:
    models = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), strict=False)
    results = {}
    for name, model in models.items():
        results[name] = run_model(model["options"], model["runs"])
        forget_model()
    Path(sys.argv[2]).write_bytes(msgspec.msgpack.encode(results))


if __name__ == "__main__":
    main()
