"""A plain chat runs the modules of its reading paths, and nothing that is loaded on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from tests.support.redis_server import new_namespace
from tests.support.running_service import MODEL, RunningService, running_service
from tools.stats import CHAT_PATHS, FRONTEND, in_rooms, on_demand, read_modules

ROOT = Path(__file__).resolve().parents[3]
# What stands around both paths: the server, the middleware, the application with its regular tasks.
AROUND = (
    *(
        "api.http.server",
        "api.http.uvicorn_compat",
        "api.http.middleware",
        "api.http.origins",
        "api.http.request_ids",
    ),
    *("api.http.traces", "api.http.accounts", "api.ids", "api.auth", "api.main"),
    "shared.huge_pages",  # once, some time after a start
    *(
        "api.services",
        "api.housekeeping",
        "api.settings",
        "api.metrics",
        "api.batches",
        "api.deployment",
        "api.files.storage",  # swept
    ),
    *("api.system", "api.jobs.accepted_jobs", "api.dialects.responses.socket"),
)
# What implements the ports of queue and log, of tokenizers and templates; logging. The scripted
# worker runs in this process, too.
BEHIND = (
    *("shared.transport", "shared.redis", "shared.text", "shared.logs", "shared.metrics"),
    *("shared.tracing", "shared.outages", "shared.settings", "shared.prompt_logprobs"),
    "shared.prefixes",  # of the submission
)


class Recorder:
    """Collects the modules whose functions run on any thread, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)

    def modules(self) -> set[str]:
        """Returns the names of those of a frontend."""
        found = set()
        for name in self.files:
            path = Path(name)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FRONTEND:
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found.add(dotted.removesuffix(".__init__"))
        return found


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    threading.setprofile(made)  # of threads that begin from now on: the service's
    yield made
    threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture
def service(
    recorder: Recorder, redis_url: str, checkpoint: Path, tmp_path: Path
) -> Iterator[RunningService]:
    settings = {"files_dir": str(tmp_path)}
    with running_service(redis_url, new_namespace(), checkpoint, **settings) as made:
        yield made


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_plain_chat_runs_what_its_reading_paths_have_and_no_part_on_demand(
    service: RunningService, recorder: Recorder, is_streamed: bool
) -> None:
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": is_streamed,
    }
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        recorder.is_on = True
        answer = client.post("/v1/chat/completions", json=chat)
        recorder.is_on = False
    assert answer.status_code == 200
    modules = in_rooms(read_modules(ROOT), FRONTEND)
    paths = set().union(*(path.modules(modules) for path in CHAT_PATHS))
    run = recorder.modules()
    assert {"api.dialects.chat.request", "api.jobs.admission", "api.jobs.event_stream"} <= run
    outside = {name for name in run - paths if not name.startswith((*AROUND, *BEHIND))}
    assert outside == set()
    assert run & set(on_demand(modules)) == set()
