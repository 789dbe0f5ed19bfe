"""Containers without an engine: an image's files in namespaces, by util-linux and iproute2.

As Docker has it: the image's user, environment and command, a process that is number 1, a root that
may be read-only, capabilities that are dropped, volumes that take the owner of what they cover, an
address and name resolution of the project's own. Not here: limits of memory and processors,
seccomp, ports published on the host. Needs root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.process import dying_with_this_process
from tests.support.compose_file import ComposeFile, Service
from tests.support.image_store import ImageConfig, ImageStore

NODES = ("null", "zero", "full", "random", "urandom", "tty")
POLL_S = 0.1
DEVICES = Path("/sys/class/net")
_OWN = set[str]()  # bridges of this process


class Network:
    """A bridge with an address for each container, and a name server that knows all of them."""

    def __init__(self, lock: Path) -> None:
        """`lock`: a file that this process holds, and that is the bridge's other name."""
        for device in DEVICES.glob("pstk*"):
            if device.name in _OWN:  # of another project of this process
                continue
            other = Path((device / "ifalias").read_text().strip())
            if other == lock or (other.name == lock.name and not _is_held(other)):
                # Of a run that was killed: the namespaces are gone, their names are not.
                for name in Path("/run/netns").glob(f"{device.name}-*"):
                    _ip("netns", "delete", name.name)
                _ip("link", "delete", device.name)
        number = next(n for n in range(64, 255) if not (DEVICES / f"pstk{n}").exists())
        self._bridge = f"pstk{number}"
        _OWN.add(self._bridge)
        self._prefix = f"10.213.{number}"
        self._names: dict[str, list[str]] = {}
        self._num_given = 1
        self._spaces: list[str] = []
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "alias", str(lock))
        _ip("address", "add", f"{self.server}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self.server, 53))
        self._answering = threading.Thread(target=self._answer, name="names", daemon=True)
        self._answering.start()

    @property
    def server(self) -> str:
        return f"{self._prefix}.1"

    def join(self, name: str) -> tuple[str, str]:
        """Returns a new network namespace and its address."""
        self._num_given += 1
        space = f"{self._bridge}-{self._num_given}"
        address = f"{self._prefix}.{self._num_given}"
        _ip("netns", "add", space)
        self._spaces.append(space)
        outer = f"{self._bridge}v{self._num_given}"
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outer, "master", self._bridge, "up")
        for command in (
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", space, *command)
        self._names.setdefault(name, []).append(address)
        return space, address

    def forget(self, name: str, address: str) -> None:
        """Takes an address from a name: its container has ended."""
        self._names[name].remove(address)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is not connected, and wakes up all the same
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answering.join()  # while it reads, the address stays in use
        self._socket.close()
        for space in self._spaces:
            _ip("netns", "delete", space)
        _ip("link", "delete", self._bridge)
        _OWN.discard(self._bridge)

    def _answer(self) -> None:
        while True:
            try:
                query, caller = self._socket.recvfrom(512)
                if not query:  # it was closed
                    return
                self._socket.sendto(self._reply(query), caller)
            except OSError:
                return

    def _reply(self, query: bytes) -> bytes:
        """Returns the answer of RFC 1035 to one question: addresses, none, or no such name."""
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        end = at + 5
        is_address = query[at + 1 : at + 3] == b"\0\1"
        addresses = self._names.get(".".join(labels).lower())
        given = list(addresses or []) if is_address else []
        flags = 0x8580 if addresses is not None else 0x8583
        header = query[:2] + struct.pack("!HHHHH", flags, 1, len(given), 0, 0)
        answers = (
            b"\xc0\x0c\0\1\0\1" + struct.pack("!IH", 1, 4) + socket.inet_aton(address)
            for address in given
        )
        return header + query[12:end] + b"".join(answers)


def _is_held(lock: Path) -> bool:
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20)


@dataclass
class Container:
    """One running container of a service."""

    service: Service
    image: ImageConfig
    name: str
    address: str
    root: Path
    files: str  # buildah's container
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)
    exit_status: int | None = None
    is_stopping: bool = False

    @property
    def pid(self) -> int:
        """Returns the container's process 1, by its number here."""
        while True:
            children = Path(
                f"/proc/{self.process.pid}/task/{self.process.pid}/children"
            ).read_text()
            if children:
                return int(children.split()[0])
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(POLL_S / 10)

    def status(self) -> dict[str, str]:
        """Returns what the kernel says of process 1: its user, its capabilities."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def execute(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as its user, as `docker compose exec` does."""
        inside = [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--pid",
            "--net",
            "--ipc",
            "--uts",
        ]
        return subprocess.run(
            [*inside, "--root", "--wd", *_as_user(self.service, self.image), *command],
            env=environment(self.service, self.image),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def healthcheck(self) -> list[str]:
        """Returns the command of the compose file, else of the image."""
        given = self.service.raw.get("healthcheck") or {}
        words = list(given.get("test") or self.image.healthcheck.get("Test") or [])
        if words and words[0] == "CMD-SHELL":
            return ["sh", "-c", words[1]]
        return words[1:]

    def is_healthy(self) -> bool:
        """Carries the healthcheck out once."""
        return self.execute(*self.healthcheck()).returncode == 0

    def wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.is_healthy():
            assert self.process.poll() is None, (
                f"{self.name} ended:\n{self.log.read_text()[-3000:]}"
            )
            assert time.monotonic() < deadline, f"{self.name}:\n{self.log.read_text()[-3000:]}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Ends all processes of the container: with its process 1 the kernel ends the others."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.process.wait(20)

    def send_stop(self) -> None:
        """Sends the image's stop signal, once, unless the container has ended."""
        if not self.is_stopping and self.process.poll() is None:
            os.kill(self.pid, signal.Signals[self.image.stop_signal])
            self.is_stopping = True


def environment(service: Service, image: ImageConfig) -> dict[str, str]:
    return {"HOME": "/", **image.env, **service.environment}


def _as_user(service: Service, image: ImageConfig) -> list[str]:
    """Returns the words that give root away: user, capabilities, what new programs may gain."""
    user, _, group = str(service.raw.get("user") or image.user or "0:0").partition(":")
    added = [f"+{name.lower()}" for name in service.raw.get("cap_add", [])]
    # A change of user takes the signal away that comes when the parent dies.
    words = ["setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups"]
    words.append("--pdeathsig=KILL")
    if service.raw.get("cap_drop") == ["ALL"]:
        words += [f"--bounding-set={','.join(['-all', *added])}", "--inh-caps=-all"]
    if "no-new-privileges:true" in service.raw.get("security_opt", []):
        words.append("--no-new-privs")
    return [*words, "--"]


class Project:
    """Containers of a compose file. Close it: that ends all and removes what they wrote."""

    def __init__(self, compose: ComposeFile, store: ImageStore, folder: Path) -> None:
        self._compose = compose
        self._store = store
        self._folder = folder
        self._network = Network(store.lock)
        self.containers: list[Container] = []

    def start(self, service: Service, further: Mapping[str, str] | None = None) -> Container:
        """Starts one more container of a service, whose needs must be there. `further`: variables
        that the test adds."""
        for name, condition in service.needs.items():
            needed = self.of(name)
            assert needed, f"{service.name} needs {name}"
            if condition == "service_healthy":
                for container in needed:
                    container.wait_until_healthy(60)
        image = self._store.config(service.raw["image"])
        files, root = self._store.mounted(service.raw["image"])
        begun = sum(each.service.name == service.name for each in self.containers)
        name = f"{service.name}-{begun + 1}"
        folder = self._folder / name
        folder.mkdir(parents=True)
        space, address = self._network.join(service.name)
        (folder / "resolv.conf").write_text(f"nameserver {self._network.server}\n")
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        script = folder / "start"
        script.write_text(self._script(service, image, root, folder))
        # As buildah's mount of the files is: seen by the container's mount namespace.
        command = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--pid", "--ipc"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--uts", "--fork", "--kill-child=KILL", "--", "sh", str(script)],
                env={**environment(service, image), **(further or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=dying_with_this_process(),
            )
        container = Container(service, image, name, address, root, files, folder / "log", process)
        self.containers.append(container)
        return container

    def of(self, name: str) -> list[Container]:
        """Returns the containers of a service that have not been stopped."""
        return [
            each
            for each in self.containers
            if each.service.name == name and each.exit_status is None
        ]

    def stop(self, container: Container) -> int:
        """Stops one as `docker compose stop` does; returns its exit status, -9 where it had to be
        killed after its grace period."""
        container.send_stop()
        try:
            status = container.process.wait(container.service.stop_grace_s)
        except subprocess.TimeoutExpired:
            container.kill()
            status = -9
        self._network.forget(container.service.name, container.address)
        container.exit_status = status
        return status

    def volume(self, name: str) -> Path:
        return self._folder / "volumes" / name

    def close(self) -> None:
        for container in self.containers:
            if container.exit_status is None:
                container.kill()
        for container in self.containers:
            self._store.remove(container.files)
        self._network.close()
        shutil.rmtree(self._folder)

    def _script(self, service: Service, image: ImageConfig, root: Path, folder: Path) -> str:
        """Returns what makes the container's view of the files and becomes its first process."""
        lines = ["set -e", f"cd {shlex.quote(str(root))}", f"hostname {folder.name}"]
        lines += ["mount --bind . .", f"cd {shlex.quote(str(root))}"]
        for made in ("proc", "dev", "sys", "tmp", "etc"):
            lines.append(f"mkdir -p {made}")
        for made in ("etc/resolv.conf", "etc/hosts"):
            lines += [f"touch {made}", f"mount --bind {folder}/{Path(made).name} {made}"]
        lines += ["mount -t proc proc proc", "mount -t tmpfs -o mode=755,size=1m dev dev"]
        for node in NODES:
            lines += [f"touch dev/{node}", f"mount --bind /dev/{node} dev/{node}"]
        shm = service.raw.get("shm_size", "64m").removesuffix("b")
        lines += ["mkdir dev/shm", f"mount -t tmpfs -o mode=1777,size={shm} shm dev/shm"]
        lines += [
            "ln -s /proc/self/fd dev/fd",
            "mount --rbind /sys sys",
            "mount -o remount,bind,ro sys",
        ]
        for entry in service.raw.get("tmpfs", []):
            goal, _, options = entry.partition(":")
            # Docker's own options come first; `exec` takes its away.
            options = ",".join(filter(None, ("noexec", "nosuid", "nodev", options)))
            lines += [f"mkdir -p .{goal}", f"mount -t tmpfs -o {options} tmpfs .{goal}"]
        for entry in service.raw.get("volumes", []):
            lines += self._mounted_volume(entry, root)
        if service.raw.get("read_only"):
            lines.append("mount -o remount,bind,ro .")
        words = service.raw.get("command") or image.command
        words = shlex.split(words) if isinstance(words, str) else words
        # Descriptors and the root are of the new view from here on.
        start = shlex.join([*_as_user(service, image), *words])
        lines.append(
            f"exec chroot . /bin/sh -c {shlex.quote(f'cd {image.directory}; exec {start}')}"
        )
        return "\n".join(lines) + "\n"

    def _mounted_volume(self, entry: str, root: Path) -> Sequence[str]:
        """A named volume that is new takes owner, mode and content of what it covers. What Docker
        has to make for a mount is root's."""
        source, goal, *options = entry.split(":")
        inside = root / goal.lstrip("/")
        if source in self._compose.volumes:
            origin = self.volume(source)
            if not origin.exists():
                origin.parent.mkdir(parents=True, exist_ok=True)
                if inside.is_dir():
                    shutil.copytree(inside, origin)
                    of = inside.stat()
                    os.chown(origin, of.st_uid, of.st_gid)
                    origin.chmod(of.st_mode)
                else:
                    origin.mkdir()
        else:
            origin = (self._compose.directory / source).resolve()
            if not origin.exists():
                origin = self._folder / "made" / goal.lstrip("/")
                origin.mkdir(parents=True, exist_ok=True)
        is_file = not origin.is_dir()
        parent = str(Path(goal).parent) if is_file else goal
        lines = [f"mkdir -p .{parent}", *([f"touch .{goal}"] if is_file else [])]
        lines.append(f"mount --bind {shlex.quote(str(origin))} .{goal}")
        return [*lines, *([f"mount -o remount,bind,ro .{goal}"] if "ro" in options else [])]
