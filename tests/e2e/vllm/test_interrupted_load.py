"""A load that a fault of the host stops is tried again until the fault has passed.

The fault is real: the engine process may open no further file, as where others have taken all
descriptors. Its successor may.
"""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest

from tests.support.launched import Launched
from tests.support.service_client import ServiceClient, token_ids_of
from tests.support.vllm_worker import READY_TIMEOUT_S, vllm_settings

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(READY_TIMEOUT_S + 60)]

LACK, REFUSED = "Too many open files", "the model cannot be served"
# Whence no file can be opened: while vLLM is imported, and while it loads the model.
STAGES = ('stage="importing vLLM" percent=0', 'stage="importing vLLM" percent=100')


@pytest.mark.promise(
    "vLLM: a start that a passing fault of the host stops is tried again, and the worker then "
    "serves (in `make chaos`)"
)
def test_a_load_is_tried_again_until_a_passing_fault_is_over(tmp_path: Path) -> None:
    penstock = Launched(tmp_path, vllm_settings(LOG_FORMAT="text"))
    penstock.spawn()
    try:
        with ServiceClient(penstock) as service:
            for num_tries, stage in enumerate(STAGES, start=1):
                await_output(penstock, stage)
                engine = service.pid_of("worker.runtime")
                resource.prlimit(engine, resource.RLIMIT_NOFILE, (0, 0))
                await_output(penstock, "starting it again", num_tries)
                assert LACK in re.findall(f"{REFUSED} (.*)", penstock.output)[-1]
            await_output(penstock, "Penstock is ready")
            assert len(token_ids_of(service.generate([11, 50, 200], 5))) == 5
        assert penstock.output.count(REFUSED) == len(STAGES)
    finally:
        penstock.kill()


def await_output(penstock: Launched, text: str, num_times: int = 1) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while penstock.output.count(text) < num_times:
        assert time.monotonic() < deadline_s, penstock.output
        time.sleep(0.01)
