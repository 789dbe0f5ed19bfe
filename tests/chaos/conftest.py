"""One deployment for all scenarios; each scenario has it whole, and must leave it at rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText
from tests.chaos.harness.scenario import Scenario
from tests.support.checkpoints import make_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chaos)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets the deployment rest while this process runs the tests of other rooms."""
    deployment = item.funcargs.get("deployment") if isinstance(item, pytest.Function) else None
    if deployment is not None and (
        nextitem is None or Path(__file__).parent not in nextitem.path.parents
    ):
        deployment.rest()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("chaos"), checkpoint)
    yield made
    made.close()


@pytest.fixture(scope="session")
def echo(checkpoint: Path) -> EchoText:
    return EchoText(checkpoint)


@pytest.fixture
async def scenario(deployment: Deployment, echo: EchoText) -> AsyncIterator[Scenario]:
    deployment.throttle.release()
    await deployment.heal()
    async with deployment.transport() as transport:
        made = Scenario(deployment, transport, echo)
        await made.oracle.begin()
        yield made
        await made.close()
    if not made.is_settled:
        deployment.reset()
