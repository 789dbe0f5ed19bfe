"""The permission for AMX, as the kernel is asked for it."""

from __future__ import annotations

import ctypes
import platform
import sys

import pytest

from worker.engines.vllm.amx import permit_amx


class Libc:
    """A kernel that answers `status`."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[int, ...]] = []

    def syscall(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.status


@pytest.mark.parametrize("status", [0, -1])
def test_the_kernel_is_asked_for_tiles(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Libc(status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert permit_amx() is (status == 0)
    assert libc.calls == [(158, 0x1023, 18)]  # arch_prctl, ARCH_REQ_XCOMP_PERM, tile data


def test_other_machines_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert not permit_amx()
