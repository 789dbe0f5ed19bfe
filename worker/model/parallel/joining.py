"""Joins a rank to its group: torch.distributed over loopback and an unlinked file."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist

from worker.engine_options import EngineOptions
from worker.model.errors import DeviceUnavailable, ModelError
from worker.model.parallel.group import RankGroup
from worker.model.parallel.mesh import Mesh

# A backstop: a rank that dies is noticed at once, one that stands still by the service's watch.
_TIMEOUT = datetime.timedelta(minutes=10)
_LOOPBACK = "lo"


def check_machine(options: EngineOptions, device: torch.device) -> None:
    """Raises ModelError where this machine, or this process, cannot run that many ranks."""
    size = options.tensor_parallel_size
    if sys.platform != "linux":
        raise DeviceUnavailable(f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} needs Linux")
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise DeviceUnavailable(
            f"PENSTOCK_TENSOR_PARALLEL_SIZE={size} needs as many CUDA devices, "
            f"torch sees {torch.cuda.device_count()}"
        )
    if dist.is_initialized():
        raise ModelError("one process holds one model with PENSTOCK_TENSOR_PARALLEL_SIZE above 1")


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Returns the device of a rank, made this process's own: CUDA devices are counted by rank."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def join(
    rank: int,
    size: int,
    store_fd: int,
    device: torch.device,
    peers: Mapping[int, socket.socket],
    memory_fd: int,
) -> RankGroup:
    """Joins the group, which waits for all ranks. gloo and a mesh of the sockets to the `peers` and
    of the shared memory on the CPU, NCCL on CUDA.

    All connections are between addresses of the loopback interface.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
    os.environ["LOCAL_RANK"] = str(rank)  # by which transformers chooses a CUDA device
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store_fd}", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if is_cuda else None,
    )
    group = RankGroup(rank, size, Mesh(rank, peers, memory_fd) if not is_cuda else None)
    group.least(0, device)  # connects
    return group
