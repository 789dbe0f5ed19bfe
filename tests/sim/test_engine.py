"""Random workloads against the fake device.

PENSTOCK_SIM_SEEDS=N runs N seeds instead of the default, PENSTOCK_SIM_FIRST_SEED=S starts at S.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.workload import Workload

NUM_SEEDS = int(os.environ.get("PENSTOCK_SIM_SEEDS", "300"))
FIRST_SEED = int(os.environ.get("PENSTOCK_SIM_FIRST_SEED", "0"))
EVERYTHING = {
    "blocks copied to host memory",
    "blocks loaded from host memory",
    "cancelled",
    "ended: engine_error",
    "ended: kv_capacity_exceeded",
    "ended: length",
    "ended: nonfinite_logits",
    "ended: stop",
    "engines ended: DeviceLost",
    "faults",
    "faults while sampling by grammars",
    "full",
    "gave way to a lane",
    "longer than the cache",
    "mixed steps",
    "preemptions",
    "prefix hits",
    "resumed",
    "with a grammar",
}


@pytest.mark.promise(
    "Runtime: every end has exactly one terminal event, with the text generated so far (steps, "
    "devices, memory, signals, deaths and lost data; a device's failures are simulated by the "
    "errors that torch raises for them)"
)
@pytest.mark.promise("Runtime: state moves with its sequence, in any order of ends")
@pytest.mark.promise("HTTP: blocks are freed at every end")
@pytest.mark.timeout(0 if "PENSTOCK_SIM_SEEDS" in os.environ else 600)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_every_request_ends_once_with_the_text_of_its_lone_run(lookahead: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS):
        try:
            seen += Workload(seed, lookahead).run()
        except BaseException as error:
            error.add_note(
                f"seed {seed}, lookahead {lookahead}; again with: PENSTOCK_SIM_SEEDS=1 "
                f"PENSTOCK_SIM_FIRST_SEED={seed} pytest tests/sim/test_engine.py"
            )
            raise
    print(sorted(seen.items()))
    if NUM_SEEDS >= 200:
        wanted = EVERYTHING | ({"ended before they were sampled"} if lookahead else set())
        assert set(seen) >= wanted, "the workloads no longer reach everything"
