"""Workers with lists of models are killed while they load another one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.scenario import Scenario
from tests.support.checkpoints import make_checkpoint
from tests.support.polling import until
from tests.support.service_processes import WorkerProcess

NUM_KILLS = 3


async def test_streams_of_models_loaded_in_turn_survive_kills_in_the_middle_of_swaps(
    scenario: Scenario, deployment: Deployment, tmp_path: Path
) -> None:
    paths = [deployment.checkpoint, *(make_checkpoint(tmp_path / n) for n in ("second", "third"))]
    models = ",".join(f"{path.name}={path}" for path in paths)
    settings = {"MODEL": "", "MODELS": models, "MODEL_SWAP_WAIT_S": 0.5}
    await deployment.use_workers(**settings)
    clients = []
    for path in paths:
        clients += scenario.clients(4, 60, model=path.name, resumes=True)
    for _ in range(NUM_KILLS):
        victim = await until(lambda: swapping(deployment.workers), "a swap")
        victim.kill()
        deployment.start_worker(**settings)
    await scenario.all_finished(clients)
    await scenario.settled()


def swapping(workers: list[WorkerProcess]) -> WorkerProcess | None:
    """Returns a live worker that has claimed a model and serves it not yet."""
    for worker in workers:
        claims = worker.log.count("loading another model next")
        if worker.alive and claims > worker.log.count("another model is served"):
            return worker
    return None
