"""The tests beside this one skip themselves where there is no Triton: that must not be here."""

from __future__ import annotations

import platform
import sys

import pytest

from tests.support.torch_device import torch_device
from tests.support.triton_device import IS_INTERPRETED, NO_TRITON, has_triton

pytestmark = pytest.mark.triton


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the extra `dev` brings no Triton for this platform",
)
def test_kernels_run_where_the_extra_dev_brings_triton() -> None:
    assert has_triton(), NO_TRITON
    assert IS_INTERPRETED or torch_device().type == "cuda", "neither interpreted nor on a device"
