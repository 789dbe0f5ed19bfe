"""This release of vLLM has what worker.engines.vllm relies upon: run it when the pin changes."""

from __future__ import annotations

import pytest

from tests.support.vllm_environment import vllm_python
from tests.support.vllm_interface import Found, check_interface
from worker.engines.vllm.options import check_version

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(vllm_python() is None, reason="no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def found() -> Found:
    return check_interface()


@pytest.mark.promise(
    "vLLM: a release of vLLM without a part that the engine uses fails with the name of the part"
)
def test_everything_that_is_relied_upon_is_there(found: Found) -> None:
    assert found.now == []


def test_what_is_not_there_is_named(found: Found) -> None:
    assert "LLMEngine has no 'has_unfinished_requests'" in found.without


def test_the_tests_run_with_a_release_that_is_said_to_be_tested(found: Found) -> None:
    assert check_version(found.version)
