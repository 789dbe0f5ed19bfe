"""Several models through ENGINE=vllm, one after the other in one process of its interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.support.vllm_runs import Answer, VllmRequest, run_in_vllm
from worker.engine_options import EngineOptions

TIMEOUT_S = 540.0
_DRIVER = Path(__file__).parents[1] / "contract/worker/engines/vllm/models_driver.py"


class Model(msgspec.Struct):
    """What the driver found: why a model is refused, or the answers of each run by request id."""

    refusal: str
    runs: list[dict[str, Answer]]

    @property
    def answers(self) -> dict[str, Answer]:
        """Of its only run."""
        assert self.refusal == ""
        (answers,) = self.runs
        return answers


@dataclass(frozen=True)
class Work:
    """A model for the driver, and its runs: the requests of each run together."""

    options: EngineOptions
    runs: list[list[VllmRequest]]


def vllm_options(checkpoint: Path, dtype: str, vllm_args: str, **members: int) -> EngineOptions:
    """Returns options for a tiny model on the CPU."""
    return EngineOptions(
        checkpoint=str(checkpoint),
        engine="vllm",
        dtype=dtype,  # type: ignore[arg-type]
        device="cpu",
        num_threads=1,
        vllm_args=vllm_args,
        **{"max_model_len": 256, "max_num_seqs": 8, "num_kv_blocks": 64, "block_size": 32}
        | members,  # type: ignore[arg-type]
    )


def run_models(models: dict[str, Work], folder: Path) -> dict[str, Model]:
    """Returns what each model says. Raises AssertionError when the process fails."""
    work, results = folder / "work", folder / "results"
    work.write_bytes(msgspec.msgpack.encode(msgspec.to_builtins(models)))
    first = next(iter(models.values())).options
    run_in_vllm([str(_DRIVER), str(work), str(results)], first, timeout_s=TIMEOUT_S)
    return msgspec.msgpack.decode(results.read_bytes(), type=dict[str, Model])
