"""The first minutes with Penstock, of somebody who holds the README alone, with their times.

    python -m tests.e2e.first_minutes                   a clone, then a wheel, to the first token
    python -m tests.e2e.first_minutes --user stranger   the same as this user; needs root
    python -m tests.e2e.first_minutes --keep PIP_FIND_LINKS --no-wheel

The user has an empty HOME, a terminal, and of this environment no variable but PATH and those of
`--keep`. Installing fetches packages: up to 5 GB for each of the two ways. Prints a table of the
steps; fails where one does not come out as the README says. Needs Chromium and redis-cli.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.launched import REPOSITORY, free_port
from tests.support.terminal import Terminal
from tests.support.walk import Step, Walk
from tests.support.walked_service import (
    READY,
    WalkedService,
    make_slow_model,
    walk_answers,
)

INSTALL_S = 1800.0
START_S = 240.0
# What is waited for from a line on, of a start and of `make run` in a fresh clone.
STARTING = (
    ("", "the launcher and its Redis start"),
    ("private (valkey|redis)", "worker and frontend start"),
    ("penstock-demo: compiling kernels", "kernels are compiled, the model is loaded"),
)
INSTALLING = (
    ("installing into", "an empty virtual environment"),
    ("installing its packages", "packages but PyTorch are fetched and unpacked"),
    ("installed its packages", "which build of PyTorch can be had"),
    ("installing PyTorch: fetching", "PyTorch is fetched"),
    ("installing PyTorch: .* unpacked", "PyTorch is unpacked"),
    ("installed PyTorch", "Penstock itself is installed"),
    *STARTING[1:],
)


@dataclass(frozen=True)
class User:
    """Who walks: an empty home, and hardly any variables."""

    home: Path
    name: str | None
    kept: Mapping[str, str]

    @property
    def env(self) -> dict[str, str]:
        own = {"HOME": str(self.home), "TERM": "xterm", "LANG": "C.UTF-8"}
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", **own, **self.kept}

    def run(self, words: Sequence[str], directory: Path, timeout_s: float = INSTALL_S) -> str:
        """Returns what a command printed on stdout. Fails with all of it where it failed."""
        as_user = {} if self.name is None else {"user": self.name, "group": self.name}
        ended = subprocess.run(  # type: ignore[call-overload]
            words,
            cwd=directory,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **as_user,
        )
        assert ended.returncode == 0, f"{words}: {ended.returncode}\n{ended.stdout}{ended.stderr}"
        return str(ended.stdout)


@contextmanager
def walker(name: str | None, kept: Sequence[str]) -> Iterator[User]:
    """Yields the user with a new, empty home, which is removed."""
    with tempfile.TemporaryDirectory(prefix="first-minutes-", ignore_cleanup_errors=True) as root:
        home = Path(root) / "home"
        home.mkdir()
        if name is not None:
            Path(root).chmod(0o755)
            account = pwd.getpwnam(name)
            os.chown(home, account.pw_uid, account.pw_gid)
        yield User(home, name, {name: os.environ[name] for name in kept if name in os.environ})


def walk_clone(walk: Walk, user: User) -> None:
    """`git clone`, `make run`, and everything that is done with the service."""
    clone = user.home / "penstock"
    with walk.step("`git clone`, of this disk"):
        # Of another user's repository, which is no part of a stranger's way.
        safe = "safe.directory=*"
        upload = ["-u", f"git -c {safe} upload-pack"]
        user.run(
            ["git", "-c", safe, "clone", "-q", *upload, str(REPOSITORY), str(clone)], user.home
        )
    make = ["make", "run", f"PENSTOCK_PORT={free_port()}"]
    with started(walk, "`make run` to the ready line", make, clone, user, INSTALL_S) as service:
        with walk.step("the printed `curl` line, to its end"):
            service.paste_curl_line()
        service.ask_in_the_page(walk)
    with (
        started(walk, "second `make run`", make, clone, user, START_S) as service,
        walk.step("its first answer"),
    ):
        service.paste_curl_line()
    slow = make_slow_model(user.home / "slow")
    more = [f"PENSTOCK_MODEL={slow}", "PENSTOCK_LOAD_FORMAT=dummy"]
    with started(walk, "`make run PENSTOCK_MODEL=…`", [*make, *more], clone, user, START_S) as it:
        walk_answers(walk, it, clone / "README.md")


def walk_wheel(walk: Walk, user: User) -> None:
    """`pip install 'penstock[worker]'` of a built wheel, and `penstock up`."""
    wheels = user.home / "wheels"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, REPOSITORY],
        check=True,
        timeout=300,
    )
    (wheel,) = wheels.glob("*.whl")
    wheels.chmod(0o755)
    with walk.step("`python3 -m venv`"):
        user.run(["python3", "-m", "venv", "environment"], user.home)
    words = ["environment/bin/pip", "install", f"penstock[worker] @ file://{wheel}"]
    with (
        walk.step("`pip install 'penstock[worker]'`") as step,
        Terminal(words, user.home, user.env, user.name) as pip,
    ):
        assert pip.wait(INSTALL_S) == 0, pip.output
        phases = (
            ("", "packages are chosen and fetched"),
            ("Installing collected packages", "packages are unpacked"),
        )
        walk.phases(step, pip, phases, pip.now_s())
    up = ["environment/bin/penstock", "up", "--port", str(free_port())]
    for name in ("`penstock up` to the ready line", "second `penstock up`"):
        with (
            started(walk, name, up, user.home, user, START_S) as service,
            walk.step("its first answer"),
        ):
            service.paste_curl_line()


@contextmanager
def started(
    walk: Walk, name: str, words: Sequence[str], directory: Path, user: User, timeout_s: float
) -> Iterator[WalkedService]:
    """Yields the service that a command started, once it is ready; then presses Ctrl-C."""
    with Terminal(words, directory, user.env, user.name) as terminal:
        step = Step(name, terminal.until(READY, timeout_s), cpu_s=terminal.cpu_s())
        is_first = terminal.when("installing into") is not None
        walk.phases(step, terminal, INSTALLING if is_first else STARTING, step.seconds)
        walk.add(step)
        yield WalkedService(terminal, directory, lambda line: user.run(line, directory, 120.0))
        with walk.step("Ctrl-C, until the prompt is back"):
            terminal.press_ctrl_c()
            code = terminal.wait(60)
        # make has the key, too, and ends by it.
        expected = -signal.SIGINT if words[0] == "make" else 0
        assert code == expected, f"{code}\n{terminal.output}"
        assert "Traceback" not in terminal.output, terminal.output


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--user", help="who walks; without it: you, with an empty HOME")
    parser.add_argument("--keep", nargs="*", default=[], help="variables that the user has too")
    parser.add_argument("--no-clone", action="store_true")
    parser.add_argument("--no-wheel", action="store_true")
    given = parser.parse_args()
    for program in ("git", "make", "curl", "redis-cli"):
        assert shutil.which(program), f"{program} is not on PATH"
    walk = Walk()
    try:
        if not given.no_clone:
            with walker(given.user, given.keep) as user:
                walk_clone(walk, user)
        if not given.no_wheel:
            with walker(given.user, given.keep) as user:
                walk_wheel(walk, user)
    finally:
        sys.stdout.write(walk.table() + "\n")


if __name__ == "__main__":
    main()
