"""What an engine of vLLM may take of a device that other workers use too."""

from __future__ import annotations

import pytest

from worker.engine_options import EngineOptions
from worker.engines.vllm.options import engine_args


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cpu", {}, {"kv_cache_memory_bytes": 2 * 2**30}),
        ("cpu", {"memory_share": 0.25}, {"kv_cache_memory_bytes": 2**29}),
        (
            "cpu",
            {"memory_share": 0.25, "kv_cache_memory_gb": 1.0},
            {"kv_cache_memory_bytes": 2**30},
        ),
        ("cuda", {}, {}),
        ("cuda", {"memory_share": 0.5}, {"gpu_memory_utilization": 0.45}),
    ],
)
def test_workers_of_one_device_divide_its_memory(
    device: str, options: dict[str, float], expected: dict[str, float]
) -> None:
    given = EngineOptions(checkpoint="/m", **options)  # type: ignore[arg-type]
    args = engine_args(given, device=device, free_bytes=4 * 2**30)
    sizes = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    assert {name: args[name] for name in sizes if name in args} == expected
