"""Several real servers that belong together: a primary with its sentinels, a cluster.

The same binary as everywhere (the ladder of penstock/launcher/redis_server.py), loopback ports,
temporary directories. Everything ends with its context, and with this process however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from redis.crc import key_slot

from penstock.launcher.redis_server import find_server_binary
from shared.process import dying_with_this_process
from tests.support.polling import wait_until

HOST = "127.0.0.1"
SERVICE = "main"
NUM_SLOTS = 16384
HOME_SLOT = key_slot(b"{p0}")
READY_S = 20.0
DOWN_AFTER_MS = 500
NODE_TIMEOUT_MS = 800


# Of the server that tests find here: WAITAOF came with Redis 7.2.
_found = find_server_binary()
HAS_WAITAOF = _found is not None and _found[1][:2] >= (7, 2)
NO_WAITAOF = ("--rename-command", "WAITAOF", "") if HAS_WAITAOF else ()  # options of a Server


class Server:
    """One server process; `start` again after `kill` finds its append-only file."""

    def __init__(self, directory: Path, name: str, port: int, *options: str) -> None:
        self.port = port
        self.name = name
        self._directory = directory / name
        self._directory.mkdir()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(HOST, port, socket_timeout=5.0, protocol=2)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        found = find_server_binary()
        assert found is not None, "no server was found"
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    found[0],
                    *self._configuration(),
                    *("--port", str(self.port), "--bind", HOST, "--dir", str(self._directory)),
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dying_with_this_process(),
            )
        wait_until(self.answers, f"{self.name} does not answer; {self._directory}/log")

    def answers(self) -> bool:
        process = self._process
        assert process is None or process.poll() is None, f"{self.name} ended"
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """As `kill -9`: no last word, no last write, nor of a child that saves for a replica."""
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def file_size(self) -> int:
        """Bytes of its append-only file since the last rewrite."""
        return self._file().stat().st_size

    def cut_to(self, num_bytes: int) -> None:
        """Of the killed server's append-only file only these are left."""
        os.truncate(self._file(), num_bytes)

    def close(self) -> None:
        self.kill()
        self.client.close()

    def _file(self) -> Path:
        (path,) = (self._directory / "appendonlydir").glob("*.incr.aof")
        return path

    def _configuration(self) -> Sequence[str]:
        return (
            *("--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"),
            *("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
        )


class SentinelServer(Server):
    """One sentinel, told of the primary and of its fellows by its configuration file."""

    def __init__(self, directory: Path, name: str, port: int, primary: Server) -> None:
        super().__init__(directory, name, port, "--sentinel")
        self.sentinel_id = hashlib.sha1(name.encode()).hexdigest()
        self._primary = primary

    def introduce(self, sentinels: Sequence[SentinelServer], quorum: int) -> None:
        """Sentinels find one another by themselves, but only every two seconds."""
        lines = [
            f"sentinel myid {self.sentinel_id}",
            f"sentinel monitor {SERVICE} {HOST} {self._primary.port} {quorum}",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {SERVICE} 4000",
        ]
        lines += [
            f"sentinel known-sentinel {SERVICE} {HOST} {other.port} {other.sentinel_id}"
            for other in sentinels
            if other is not self
        ]
        (self._directory / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def _configuration(self) -> Sequence[str]:
        return (str(self._directory / "sentinel.conf"),)


class Topology:
    """Servers that start and end together."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="penstock-topology-"))
        self.servers: list[Server] = []

    def __enter__(self) -> Any:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        raise NotImplementedError


class SentinelSetup(Topology):
    """A primary, a replica and three sentinels of which two must agree."""

    def __init__(self) -> None:
        super().__init__()
        ports = free_ports(5)
        first = Server(self._directory, "first", ports[0])
        second = Server(self._directory, "second", ports[1])
        self.data = [first, second]
        self.sentinels = [
            SentinelServer(self._directory, f"sentinel-{port}", port, first) for port in ports[2:]
        ]
        self.servers = [*self.data, *self.sentinels]
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        self.url = f"redis+sentinel://{addresses}/{SERVICE}"

    def _start(self) -> None:
        for server in self.data:
            server.start()
        self.data[1].client.replicaof(HOST, self.data[0].port)
        for sentinel in self.sentinels:
            sentinel.introduce(self.sentinels, quorum=2)
            sentinel.start()
        wait_until(self._is_whole, "the primary and its replica did not find each other")

    def primary(self) -> Server:
        """Whom the sentinels name at the moment."""
        port = self.sentinels[0].client.sentinel_get_master_addr_by_name(SERVICE)[1]
        return next(server for server in self.data if server.port == int(port))

    def _is_whole(self) -> bool:
        primary, replica = self.data
        is_known = all(self._knows_all(one, primary) for one in self.sentinels)
        return is_known and replica.client.role()[0] == b"slave" and _is_in_step(primary)

    def _knows_all(self, sentinel: Server, primary: Server) -> bool:
        state = sentinel.client.sentinel_masters()[SERVICE]
        return bool(
            state["port"] == primary.port
            and state["flags"] == "master"
            and state["num-slaves"] == 1
            and state["num-other-sentinels"] == len(self.sentinels) - 1
            and sentinel.client.sentinel_slaves(SERVICE)[0]["flags"] == "slave"
        )


class ClusterSetup(Topology):
    """Three primaries, and a replica of the one that has the partition `{p0}`."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        ports = free_ports(8)
        self.nodes = [
            Server(
                self._directory,
                f"node-{port}",
                port,
                *("--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
                *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
                *("--cluster-replica-validity-factor", "0"),
                *options,
            )
            for port, bus_port in zip(ports[:4], ports[4:], strict=True)
        ]
        self._bus_ports = ports[4:]
        self.servers = list(self.nodes)
        addresses = ",".join(f"{HOST}:{node.port}" for node in self.nodes[:3])
        self.url = f"redis+cluster://{addresses}"
        self.slot = HOME_SLOT

    def _start(self) -> None:
        bounds = [0, 5461, 10923, NUM_SLOTS]
        for number, node in enumerate(self.nodes):
            node.start()
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                first, last = bounds[number], bounds[number + 1] - 1
                node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node, bus_port in zip(self.nodes[1:], self._bus_ports[1:], strict=True):
            self.nodes[0].client.execute_command("CLUSTER", "MEET", HOST, node.port, bus_port)
        wait_until(self._all_know_four, "the nodes did not meet")
        owner_id = self.id_of(next(n for n in self.nodes[:3] if self._has_slot(n, self.slot)))
        wait_until(
            lambda: self._replicates(self.nodes[3], owner_id), "the replica was not accepted"
        )
        self.heal()

    def owner(self, slot: int | None = None) -> Server:
        """The primary of the slot, as it sees itself."""
        wanted = self.slot if slot is None else slot
        return next(
            node
            for node in self.nodes
            if node.is_running
            and node.client.role()[0] == b"master"
            and self._has_slot(node, wanted)
        )

    def replica(self) -> Server:
        return next(node for node in self.nodes if node.client.role()[0] == b"slave")

    def id_of(self, node: Server) -> str:
        return str(node.client.execute_command("CLUSTER", "MYID").decode())

    def heal(self) -> None:
        """Every node runs, all slots are served, the replica is in step."""
        for node in self.nodes:
            if not node.is_running:
                node.start()
        wait_until(self.is_whole, "the cluster did not come together")

    def is_whole(self) -> bool:
        with contextlib.suppress(redis.RedisError, StopIteration):
            infos = [node.client.execute_command("CLUSTER", "INFO") for node in self.nodes]
            roles = sorted(node.client.role()[0] for node in self.nodes)
            return (
                all(b"cluster_state:ok" in info for info in infos)
                and roles == [b"master"] * 3 + [b"slave"]
                and _is_in_step(self.owner(HOME_SLOT))
            )
        return False

    def move_slot(self, to: Server) -> None:
        """Gives the partition's slot to another primary, at once where the server can do that."""
        if not self.moves_atomically():
            self.move_key_by_key(to)
            return
        slot = ("SLOTSRANGE", self.slot, self.slot, "NODE", self.id_of(to))
        self.owner().client.execute_command("CLUSTER", "MIGRATESLOTS", *slot)
        wait_until(lambda: self._all_agree_on(to), "the slot did not arrive")

    def moves_atomically(self) -> bool:
        """Valkey 9 can."""
        help_lines = self.nodes[0].client.execute_command("CLUSTER", "HELP")
        return any(line.startswith(b"MIGRATESLOTS") for line in help_lines)

    def move_key_by_key(self, to: Server, pause_s: float = 0.0) -> None:
        """Gives the partition's slot to another primary as `redis-cli --cluster reshard` does:
        with a pause after every key, in an order of chance."""
        source, wanted = self.owner(), self.id_of(to)
        importing = ("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.id_of(source))
        to.client.execute_command(*importing)
        source.client.execute_command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", wanted)
        while keys := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1000):
            key = random.choice(keys)
            source.client.execute_command("MIGRATE", HOST, to.port, key, 0, 5000)
            time.sleep(pause_s)
        for node in (to, source, *self.nodes):
            if node.client.role()[0] == b"master":
                node.client.execute_command("CLUSTER", "SETSLOT", self.slot, "NODE", wanted)
        wait_until(lambda: self._all_agree_on(to), "the slot did not arrive")

    def _all_agree_on(self, owner: Server) -> bool:
        for node in self.nodes:
            for first, last, holder, *_ in node.client.execute_command("CLUSTER", "SLOTS"):
                if first <= self.slot <= last and int(holder[1]) != owner.port:
                    return False
        return True

    def _all_know_four(self) -> bool:
        views = [node.client.execute_command("CLUSTER", "NODES") for node in self.nodes]
        return all(view.count(b" connected") == 4 and b"handshake" not in view for view in views)

    def _replicates(self, node: Server, primary_id: str) -> bool:
        try:
            node.client.execute_command("CLUSTER", "REPLICATE", primary_id)
        except redis.ResponseError:  # the gossip has not told it of that node yet
            return False
        return True

    def _has_slot(self, node: Server, slot: int) -> bool:
        for first, last, owner, *_ in node.client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return int(owner[1]) == node.port
        return False


class Primaries(Topology):
    """A cluster of primaries without replicas."""

    def __init__(self, count: int) -> None:
        super().__init__()
        ports = free_ports(2 * count)
        self._bus_ports = ports[count:]
        self.nodes = [
            Server(
                self._directory,
                f"node-{port}",
                port,
                *("--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
                *("--cluster-require-full-coverage", "no"),
            )
            for port, bus_port in zip(ports, self._bus_ports, strict=False)
        ]
        self.servers = list(self.nodes)
        self.url = "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def _start(self) -> None:
        first, *others = self.nodes
        for number, node in enumerate(self.nodes):
            node.start()
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            bounds = [NUM_SLOTS * n // len(self.nodes) for n in (number, number + 1)]
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[0], bounds[1] - 1)
        for node, bus_port in zip(others, self._bus_ports[1:], strict=True):
            first.client.execute_command("CLUSTER", "MEET", HOST, node.port, bus_port)
        wait_until(self._is_whole, "the nodes did not meet")

    def _is_whole(self) -> bool:
        infos = [node.client.execute_command("CLUSTER", "INFO") for node in self.nodes]
        known = f"cluster_known_nodes:{len(self.nodes)}".encode()
        return all(b"cluster_state:ok" in info and known in info for info in infos)


def _is_in_step(primary: Server) -> bool:
    """Its replica has what is written now. What either says of the link is not enough: it is "up"
    and "online" before a word is sent over it."""
    primary.client.set("{p0}:in-step", b"")
    num_replicas = primary.client.wait(1, 500)
    primary.client.delete("{p0}:in-step")
    return bool(num_replicas == 1)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, below those that outgoing connections are given: a
    killed server must find its port free again."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("there are no free ports")
