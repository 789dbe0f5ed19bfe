"""The operator's tasks by the command lines of docs/guides/operate, with their times.

    python -m tests.e2e.operator_tasks

In terminals, a browser, and two network namespaces as two hosts, which need root. Lines of
systemctl, kubectl and helm are left out. Prints a table of the steps; fails where one does not come
out as its page has it. Needs Chromium, curl, redis-cli and haproxy.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.operator_walk import (
    shell_in,
    walk_install,
    walk_machines,
    walk_processes,
    walk_service,
)
from tests.support.two_machines import NO_MACHINES, can_make_machines
from tests.support.walk import Walk


def main() -> None:
    walk = Walk()
    with tempfile.TemporaryDirectory(prefix="operator-", ignore_cleanup_errors=True) as name:
        directories = [Path(name) / task for task in ("install", "service", "parts", "hosts")]
        for directory in directories:
            directory.mkdir()
        installed, service, parts, hosts = directories
        try:
            walk_install(walk, shell_in(installed))
            walk_service(walk, shell_in(service))
            walk_processes(walk, shell_in(parts))
            if can_make_machines():
                walk_machines(walk, hosts)
            else:
                sys.stderr.write(f"add a machine is left out: {NO_MACHINES}\n")
        finally:
            sys.stdout.write(walk.table() + "\n")


if __name__ == "__main__":
    main()
