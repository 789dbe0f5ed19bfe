"""The sampler follows vLLM's batch through any order of updates: vLLM's own classes make them.

Runs in vLLM's interpreter, without a model: see batch_driver.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.vllm_environment import vllm_python
from tests.support.vllm_runs import run_in_vllm
from worker.engine_options import EngineOptions

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]
DRIVER = Path(__file__).with_name("batch_driver.py")


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    printed = run_in_vllm([str(DRIVER)], EngineOptions(checkpoint="", engine="vllm")).stdout
    return json.loads(printed.splitlines()[-1])


def test_random_updates_never_mix_up_requests(found: dict[str, int]) -> None:
    """Adding, removing, condensing, swapping, preempting: each row draws what it draws alone."""
    assert found["drawn"] > 3000
    assert found["preempted"] > 50
    assert found["swapped"] > 50
    assert found["wrong"] == 0


def test_tokens_in_flight_are_filled_in_before_the_sampler_looks(found: dict[str, int]) -> None:
    """As with async scheduling: the runner's list ends with a placeholder until just before."""
    assert found["async_drawn"] > 3000
    assert found["async_wrong"] == 0


def test_a_token_that_is_not_filled_in_is_an_error(found: dict[str, int]) -> None:
    assert found["placeholder_raises"] == 1
