"""Measuring the largest step gives back all that it took, before the KV cache is sized."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch

from tests.support.native_models import MAX_LEN, QWEN3, new_model
from tests.support.triton_device import IS_INTERPRETED, NOT_INTERPRETED, has_triton

if not (has_triton() and IS_INTERPRETED):
    pytest.skip(NOT_INTERPRETED, allow_module_level=True)

from tests.support import cuda_on_cpu
from tests.support.cuda_on_cpu import CudaOnCpu
from worker.engine_options import EngineOptions
from worker.model.base import DecoderStack
from worker.model.cuda import graphs
from worker.model.cuda.stack import CudaOps, CudaStack
from worker.model.cuda.tier import with_graphs
from worker.model.kv_cache import KVCachePool, KVGroups
from worker.model.served import BuiltStack
from worker.model.step import kv_sizing

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of keys that nothing wrote
]
BLOCK_SIZE = 16


T = TypeVar("T")


class Captured:
    """A `Capture` as that of a device: a replay refers to its result alone."""

    def __init__(self, device: torch.device, **options: object) -> None:
        """Takes any."""

    def __call__(self, run: Callable[[], T]) -> Callable[[], T]:
        result = run()
        return lambda: result

    def fastest(self, replays: Sequence[Callable[[], None]]) -> int:
        return 0


def bytes_of_tensors() -> int:
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("uses_graphs", [False, True])
def test_the_widest_sample_is_given_back(
    uses_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    cuda_on_cpu.set_up(monkeypatch)
    monkeypatch.setattr(graphs, "CudaCapture", Captured)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda *_: seen.update(before=bytes_of_tensors())
    )
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda *_: seen.update(peak=bytes_of_tensors()) or 0
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.update(after=bytes_of_tensors()))
    options = EngineOptions(
        checkpoint="",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        cuda_graphs=uses_graphs,
    )
    with CudaOnCpu():
        shape = QWEN3 | {"num_hidden_layers": 1}
        device = torch.device("cuda", 0)
        model = new_model(shape, CudaOps(), device=device, dtype=torch.float32)

        def stack(pool: KVCachePool) -> DecoderStack:
            whole = CudaStack(model, pool)
            return with_graphs(whole, options, model, MAX_LEN, pool, whole.layer_weights)

        built = BuiltStack(
            model=model, keeps=model.config, kv_dtype=torch.float32, stack=stack, tier="triton"
        )
        groups = KVGroups.single(model.config.kv_layers)
        gc.collect()
        gc.disable()
        try:
            assert kv_sizing._free_bytes(options, built, BLOCK_SIZE, MAX_LEN, groups) > 0
        finally:
            gc.enable()
    assert seen["peak"] > seen["before"]
    assert seen["after"] == seen["before"], "empty_cache gives back what nothing refers to"
