"""The read side of the Durable Streams protocol's own conformance suite, against a job's text."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from tests.support.durable_writer import DurableWriter
from tests.support.node import installed_clients
from tests.support.running_service import RunningService

pytestmark = [pytest.mark.node, pytest.mark.packages, pytest.mark.timeout(600)]

HERE = Path(__file__).resolve().parent / "durable_streams"
RUNNER = """\
import { runConformanceTests } from "@durable-streams/server-conformance-tests"
runConformanceTests({ baseUrl: process.env.CONFORMANCE_TEST_URL })
"""
LINES = (HERE / "cases.txt").read_text().splitlines()
CASES = [line for line in LINES if not line.startswith("#")]


@pytest.fixture
def writer_url(service: RunningService) -> Iterator[str]:
    service.script.starts = False

    async def started() -> tuple[uvicorn.Server, asyncio.Task[None]]:
        config = uvicorn.Config(DurableWriter(service), port=0, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        return server, task

    server, task = service.call(started())

    async def stopped() -> None:
        server.should_exit = server.force_exit = True
        await task

    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    service.call(stopped())


def test_the_read_side_conforms(writer_url: str, tmp_path: Path) -> None:
    packages = installed_clients(HERE) / "node_modules"
    (tmp_path / "node_modules").symlink_to(packages)
    (tmp_path / "run.test.mjs").write_text(RUNNER)
    report = tmp_path / "report.json"
    command = [str(packages / ".bin/vitest"), "run", "--root", str(tmp_path), "--testTimeout=40000"]
    ended = subprocess.run(
        [*command, "--reporter=json", f"--outputFile={report}", *_selection()],
        env={**os.environ, "CONFORMANCE_TEST_URL": writer_url},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert report.exists(), ended.stdout + ended.stderr
    (file,) = json.loads(report.read_text())["testResults"]
    cases = {case["fullName"].strip(): case for case in file["assertionResults"]}
    run = {name: case for name, case in cases.items() if case["status"] in ("passed", "failed")}
    failed = [case for case in run.values() if case["status"] == "failed"]
    assert not failed, json.dumps(failed, indent=2)
    assert sorted(run) == sorted(CASES)


def _selection() -> list[str]:
    signs = frozenset("\\.+*?()|[]{}^$/-")
    names = ("".join(f"\\{c}" if c in signs else c for c in name) for name in CASES)
    return ["--testNamePattern", f"^\\s*({'|'.join(names)})$"]
