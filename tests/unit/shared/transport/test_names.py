"""Keys, job ids, addresses."""

from __future__ import annotations

import time
import uuid
from collections import Counter

import pytest
from redis.asyncio.connection import SSLConnection, parse_url
from redis.crc import key_slot

from shared.keys import (
    HASH_TAGS,
    Keys,
    is_job_id,
    new_job_id,
    partition_of,
)
from shared.partitions import PartitionCount, by_partition
from shared.redis.connections import Connections
from shared.redis.url import (
    ServerKind,
    UnsupportedUrl,
    parse_deployment,
    redacted,
    scheme_of,
)
from tests.support.table import table


def test_every_key_carries_the_hash_tag() -> None:
    keys = Keys("ns")
    names = [
        *keys.queues("a:b/c"),
        keys.job("0-x"),
        keys.request("0-x"),
        keys.log("0-x"),
        keys.channel("0-x"),
        keys.control("w"),
        keys.worker("w"),
        keys.probe("w"),
        keys.frontend("f"),
        keys.tenant("t"),
        keys.limit("t"),
        keys.work("m"),
        keys.secret("p"),
        keys.idempotency("d"),
        keys.blob("d"),
        keys.ended("failed"),
        keys.file("file-0-x"),
        keys.files_of("t"),
        keys.batch("batch_0-x"),
        keys.batches_of("t"),
        keys.files,
        keys.files_bytes,
        keys.blobs_gone,
        keys.batches_open,
        keys.live,
        keys.workers,
        keys.stat,
        keys.dead_letters,
        keys.dead_letter("0-x"),
        keys.models,
        keys.models_seen,
    ]
    assert all(name.startswith("ns:{p0}:") for name in names)
    assert len(set(names)) == len(names)
    assert Keys().job("0-x") == "penstock:{p0}:job:0-x"
    assert Keys(partition=2).job("2-x") == "penstock:{p2ac}:job:2-x"


@pytest.mark.parametrize("num_shards", range(2, 9))
def test_partitions_are_spread_over_the_shards_of_a_cluster(num_shards: int) -> None:
    for num in (2 * num_shards, 4 * num_shards):
        slots = [key_slot(tag.encode()) for tag in HASH_TAGS[:num]]
        on_shards = Counter(slot * num_shards // 16384 for slot in slots)
        assert len(on_shards) == num_shards
        assert max(on_shards.values()) <= 2 * num / num_shards


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", (1, 0)), ("12", (12, 0)), ("1+3", (1, 3)), ("0", None), ("30+3", None), ("x", None)],
)
def test_numbers_of_partitions_are_read(text: str, count: tuple[int, int] | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match="like 1\\+3"):
            PartitionCount.parse(text)
    else:
        assert PartitionCount.parse(text) == count


def test_an_id_names_its_partition() -> None:
    ids = [new_job_id(), new_job_id(31), "7-x_12", "batch_0-x"]
    assert [partition_of(job_id) for job_id in ids] == [0, 31, 7, 0]
    assert by_partition([ids[1], ids[0], ids[1]]) == {31: [0, 2], 0: [1]}


@pytest.mark.parametrize("namespace", ["", "a b", "a{b}", "x" * 65, "é", "a*"])
def test_a_namespace_that_would_break_the_tag_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        Keys(namespace)


def test_lanes_have_their_range() -> None:
    with pytest.raises(ValueError, match="lane"):
        Keys().queue("m", 8)


@pytest.mark.promise("Streaming: unique ids in order of time; the submit time is recorded")
def test_job_ids_are_time_ordered_uuids() -> None:
    job_id = new_job_id()
    first, _, rest = job_id.partition("-")
    value = uuid.UUID(rest)
    assert (first, value.version, value.variant) == ("0", 7, uuid.RFC_4122)
    assert abs((value.int >> 80) - time.time() * 1000) < 60_000
    assert is_job_id(job_id)
    assert len({new_job_id() for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "job_id",
    ["", "0", "0-", "-1-a", "100-a", "00-a", "0-a:b", "0-a\n", "0-*", "x-a", "0-" + "a" * 65],
)
def test_what_cannot_be_a_job_id_is_refused(job_id: str) -> None:
    assert not is_job_id(job_id)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:s3cret@host:1/2", "redis://***@host:1/2"),
        ("rediss://me:s3cret@host/", "rediss://***@host/"),
        ("redis://me:s3c/r?e#t@host:1/0", "redis://***@host:1/0"),
        ("redis://host?password=s3cret&db=1", "redis://host?password=***&db=1"),
        ("unix://:s3cret@/tmp/x.sock?db=2", "unix://***@/tmp/x.sock?db=2"),
        ("unix:///tmp/x.sock", "unix:///tmp/x.sock"),
        ("redis+sentinel://me:s3cret@a:1,b:2/main/0", "redis+sentinel://***@a:1,b:2/main/0"),
        (
            "redis+sentinel://a:1/main?sentinel_password=s3cret",
            "redis+sentinel://a:1/main?sentinel_password=***",
        ),
        ("rediss+cluster://:s3cret@a,[::1]:7", "rediss+cluster://***@a,[::1]:7"),
        ("s3cret", "***"),
    ],
)
def test_a_shown_url_holds_no_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
    assert "s3c" not in redacted(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://h:1/0?ssl_cert_reqs=none",
        "unix:///s",
        "fake://",
        "REDIS://h",
        "redis+sentinel://h/main",
        "rediss+sentinel://u:p@h:1,[::1]:2/main/3?ssl_check_hostname=no&sentinel_password=x",
        "redis+cluster://h:1,h2",
        "rediss+cluster://:p@h/0?ssl_ca_certs=/ca.pem",
    ],
)
def test_known_schemes_are_accepted(url: str) -> None:
    assert scheme_of(url) == url.partition(":")[0].lower()


@table(
    ("url", "words"),
    [
        ("redis+sentinel://:s3cret@h", "the sentinels' name"),
        ("redis+sentinel://:s3cret@h/a b", "the sentinels' name"),
        ("redis+sentinel://:s3cret@h/main/x", "the database is a number"),
        ("redis+sentinel://:s3cret@h/main?db=1", "'db' is not supported"),
        ("redis+sentinel://:s3c/s3cret@h/main", "%2F"),
        ("redis+sentinel://:s3c?s3cret@h/main", "%2F"),
        ("redis+sentinel://:s3c#s3cret@h/main", "malformed"),
        ("redis+sentinel://:s3cret@h,/main", "host:port,host:port"),
        ("redis+cluster://:s3cret@h:1:2", "host:port,host:port"),
        ("redis+cluster://:s3cret@h:70000", "host:port,host:port"),
        ("redis+cluster://:s3cret@" + ",".join(f"h{n}" for n in range(33)), "more than 32"),
        ("redis+cluster://:s3cret@h/1", "only database 0"),
        ("redis+cluster://h?sentinel_password=s3cret", "'sentinel_password' is not supported"),
        ("redis+cluster://:[s3cret@h", "malformed"),
        ("redis://:s3cret@h?ssl_ca_certs=x", "'ssl_ca_certs' is not supported"),
        ("rediss://:s3cret@h?ssl_nonsense=1", "'ssl_nonsense' is not supported"),
        ("rediss+cluster://:s3cret@h?ssl_min_version=x", "malformed"),
        ("http://:s3cret@h", "http:// is not a supported scheme"),
        ("localhost:6379", "must begin with"),
        ("", "must begin with"),
        ("unix://", "path of a socket"),
        ("redis://:s3cret@h:port/", "malformed"),
        ("redis://:s3cret@h/?socket_timeout=5", "'socket_timeout' is not supported"),
        ("redis://:s3cret@h/?db=abc", "malformed"),
    ],
)
def test_an_unusable_url_is_refused_in_words_without_its_password(url: str, words: str) -> None:
    with pytest.raises(UnsupportedUrl, match=words) as caught:
        Connections(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_deployment_is_taken_apart() -> None:
    sentinels = parse_deployment(
        "rediss+sentinel://me:a%40b@h:1,h2,h:1/main/3"
        "?ssl_check_hostname=no&sentinel_username=s&sentinel_password=p%26q"
    )
    assert sentinels.kind is ServerKind.SENTINEL
    assert sentinels.addresses == (("h", 1), ("h2", 26379))
    assert sentinels.service == "main"
    assert parse_url(sentinels.server_url) == {
        "host": "server",
        "username": "me",
        "password": "a@b",
        "db": 3,
        "ssl_check_hostname": False,
        "connection_class": SSLConnection,
    }
    assert parse_url(sentinels.sentinel_url) == {
        "host": "sentinel",
        "username": "s",
        "password": "p&q",
        "db": 0,
        "ssl_check_hostname": False,
        "connection_class": SSLConnection,
    }
    cluster = parse_deployment("redis+cluster://[::1]:7000,h")
    assert cluster.addresses == (("::1", 7000), ("h", 6379))
    assert parse_url(cluster.server_url) == {"host": "server", "db": 0}
