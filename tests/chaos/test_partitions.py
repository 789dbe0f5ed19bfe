"""Three partitions on the three primaries of a cluster, which die or are resharded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from redis.crc import key_slot

from shared.keys import HASH_TAGS, partition_of
from tests.chaos.harness.clients import Client
from tests.chaos.harness.deployment import Deployment
from tests.chaos.harness.expected import EchoText
from tests.chaos.harness.scenario import Scenario
from tests.support.polling import until
from tests.support.redis_topologies import ClusterSetup

NUM_STREAMS = 12
MAX_TOKENS = 300
PARTITION = 1  # that things happen to; only the first one's primary has a replica


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSetup]:
    with ClusterSetup("--cluster-require-full-coverage", "no") as setup:
        setup.slot = key_slot(HASH_TAGS[PARTITION].encode())
        yield setup


@pytest.fixture(scope="module")
def over_shards(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, cluster: ClusterSetup
) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("partitions"), checkpoint)
    made.redis_url = cluster.url
    made.change_usual(num_workers=2, PARTITIONS="3")
    made.change_frontends(PARTITIONS="3")
    yield made
    made.close()


@pytest.fixture
async def streams(over_shards: Deployment, echo: EchoText) -> AsyncIterator[Scenario]:
    over_shards.throttle.release()
    await over_shards.heal()
    async with over_shards.transport() as transport:  # to a server without any job
        made = Scenario(over_shards, transport, echo)
        yield made
        await made.close()


def in_partition(clients: Sequence[Client], number: int) -> list[Client]:
    return [client for client in clients if partition_of(client.reading.job_id) == number]


async def test_resharding_in_the_middle_of_streams_loses_nothing(
    streams: Scenario, cluster: ClusterSetup
) -> None:
    before = cluster.owner()
    to = next(node for node in cluster.nodes if node is not before and _is_primary(node))
    clients = streams.clients(NUM_STREAMS, MAX_TOKENS, resumes=True)
    async with streams.middle_of(clients, 20):
        assert in_partition(clients, PARTITION)
        streams.deployment.throttle.release()
        await asyncio.to_thread(cluster.move_key_by_key, to, 0.005)
    await streams.all_finished([*clients, *streams.clients(6, 30, resumes=True)])
    assert cluster.owner() is to
    await asyncio.to_thread(cluster.move_slot, before)


async def test_a_shards_death_pauses_its_jobs_and_no_others(
    streams: Scenario, cluster: ClusterSetup
) -> None:
    async def takes_new_jobs() -> bool:
        more = streams.clients(3, 10)
        await streams.all_finished(more)
        return bool(in_partition(more, PARTITION))

    await until(takes_new_jobs, "new jobs in the partition, which a slow answer may have put away")
    clients = streams.clients(NUM_STREAMS, MAX_TOKENS, resumes=True)
    async with streams.middle_of(clients, 20):
        cut = in_partition(clients, PARTITION)
        others = [client for client in clients if client not in cut]
        assert cut
        assert others
        cluster.owner().kill()
    await streams.all_finished(others)
    assert not any(client.has_ended for client in cut)
    later = streams.clients(6, 60, resumes=True)  # go to the shards that answer
    await streams.all_finished(later)
    assert not in_partition(later, PARTITION)
    assert not any(client.has_ended for client in cut)
    await asyncio.to_thread(cluster.heal)
    await streams.all_finished(cut)
    await until(takes_new_jobs, "new jobs in the partition that is back")


def _is_primary(node: object) -> bool:
    return bool(node.client.role()[0] == b"master")  # type: ignore[attr-defined]
