"""Host microseconds of a launch by Triton, with a driver that launches nothing, as a table.

    python -m bench.launch_time

Needs no GPU: kernels are compiled for an H100, and a stub of libcuda accepts them. These launches
bound steps that are not replayed as a graph, such as long prompts. A layer of Qwen3 has five of
them: two norms and the next three rows. Its four products, by cuBLAS, are not measured. Processor
time of the thread, the median of several rounds. Needs torch, Triton, a C compiler and Python.h.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.machine import cpu_name

HEADS, KV_HEADS, DIM, HIDDEN = 16, 8, 128, 1024  # of Qwen3-0.6B
TOKENS, BLOCK_SIZE = 16, 16
ROUNDS = 9
CAPABILITY = (9, 0)
# Every function of the driver that Triton calls succeeds. A pointer is the device's own.
STUB = """
typedef unsigned long long pointer;
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetLimit(unsigned long *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, unsigned long value) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)1;
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttribute(void *data, int attribute, pointer place) {
    *(pointer *)data = place;
    return 0;
}
int cuLaunchKernelEx(void *config, void *function, void **arguments, void **extra) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "a stub's error"; return 0; }
"""


def load_stub(folder: Path) -> None:
    """Builds the stub and loads it, so that it is this process's libcuda.so.1."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB, encoding="utf-8")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    words: list[str | Path] = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library,
        source,
    ]
    subprocess.run(words, check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def use_stub() -> None:
    """Has Triton launch by the stub."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda device: 0
    driver.get_device_capability = lambda device=None: CAPABILITY
    triton.runtime.driver.set_active(driver)


def launches() -> dict[str, tuple[int, Callable[[], Any]]]:
    """Returns what launches kernels, and how many."""
    from worker.model.base import AttentionMetadata, KVLayer, LayerScores
    from worker.model.cuda.attention import TritonAttention
    from worker.model.cuda.layers import add_norm, gate, rotate_and_store
    from worker.model.kv_cache import KVCachePool
    from worker.model.layers.ops import Norm

    dtype, device = torch.bfloat16, torch.device("cpu")

    class Layers:
        kv_layers = (KVLayer(KV_HEADS, DIM, DIM),)

    pool = KVCachePool(Layers(), TOKENS // BLOCK_SIZE + 1, BLOCK_SIZE, device=device, dtype=dtype)
    x, delta = (torch.zeros(TOKENS, HIDDEN, dtype=dtype) for _ in range(2))
    norm = Norm(torch.ones(HIDDEN, dtype=dtype), 1e-6)
    both = torch.zeros(TOKENS, 6 * HIDDEN, dtype=dtype)
    qkv = torch.zeros(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    tables = (torch.zeros(64, DIM // 2, dtype=dtype),) * 2
    places = torch.arange(TOKENS, dtype=torch.int32)
    q, out = (torch.zeros(TOKENS, HEADS, DIM, dtype=dtype) for _ in range(2))

    def attention(num_decodes: int) -> Callable[[], None]:
        lengths = (1,) * num_decodes if num_decodes else (TOKENS,)
        ends = [0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))]
        backend = TritonAttention(pool, [LayerScores()])
        metadata = AttentionMetadata(
            cu_q=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.zeros(1, len(lengths), 1, dtype=torch.int32),
            slots=places[None],
            num_decodes=num_decodes,
            max_query_len=max(lengths),
            num_tokens=TOKENS,
            query_lens=lengths,
            context_lens=lengths,
        )
        backend.prepare(metadata)
        backend.attend(0, q, out)  # plans, for all layers
        return lambda: backend.attend(0, q, out)

    return {
        "residual and norm": (1, lambda: add_norm(x, delta, norm, None)),
        "rotation and store": (
            1,
            lambda: rotate_and_store(
                qkv, places, places, tables, None, pool.keys[0], pool.values[0]
            ),
        ),
        "gate": (1, lambda: gate(both, "silu")),
        "attention of a whole prompt": (1, attention(0)),
        "attention of decodes": (2, attention(TOKENS)),
    }


def microseconds(launch: Callable[[], Any], calls: int) -> float:
    """Returns the median of a call."""
    times = []
    for _ in range(ROUNDS):
        begin_s = time.thread_time()
        for _ in range(calls):
            launch()
        times.append((time.thread_time() - begin_s) / calls * 1e6)
    return median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000, help="in a round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        load_stub(Path(folder))
        use_stub()
        import triton

        print(f"{cpu_name()}, torch {torch.__version__}, Triton {triton.__version__}")
        print(f"{'':28} {'launches':>8} {'us':>7} {'us a launch':>12}")
        for name, (count, launch) in launches().items():
            each = microseconds(launch, args.calls)
            print(f"{name:28} {count:8} {each:7.1f} {each / count:12.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
