"""Codex, Claude Code, opencode and aider, as they are installed, do their tasks to the end.

Only the model is scripted (tests.support.scripted_model): its calls are parsed, run by the program,
and come back with the next turn, for the chat templates of six families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.clients.programs.mcp_server import LEVEL
from tests.support.launched import Launched
from tests.support.programs import MODEL, PROGRAMS, Place, write_picture
from tests.support.scripted_model import SCRIPT, Script, Turn, step_mark
from tests.support.throttle import FAULTS
from tests.support.tool_models import (
    make_family_checkpoint,
    make_hermes_checkpoint,
    make_llama3_checkpoint,
)

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.node, pytest.mark.packages, pytest.mark.timeout(600)]
# Qwen3, Qwen3.5, Llama 3, Mistral, Gemma and gpt-oss.
FAMILIES = ("hermes", "qwen3-coder", "llama3", "mistral-named", "gemma4", "gpt-oss")
KILLS = ("", "worker", "frontend")
READ, PATCH, REFUSE = "task-of-reading", "task-of-patching", "task-of-refusing"
NO_IMAGES = "does not support image input"
READ_ANSWER = "The notes have 42, the gate has seven metres."
PATCHED = "The level is 43 now."
REFUSAL = "I cannot open the gate: that is not mine to decide."
MOST_RECOMPUTED = 0.03  # of the prompt tokens of a session, on one worker
MARKS = [step_mark(turn) for turn in range(1, 6)]


def _reading(
    read: tuple[str, str], look: tuple[str, str], measure: str, folder: Path
) -> list[Turn]:
    """Reads the notes and a picture, and measures. `read` and `look` are tools and their parameter
    for a path, which has the mark of the step."""
    return [
        Turn("", read[0], {read[1]: str(folder / f"data/{MARKS[0]}.txt")}),
        Turn("", look[0], {look[1]: str(folder / f"data/{MARKS[1]}.png")}, expects="42"),
        Turn("", measure, {"gate": "north", "note": MARKS[2]}, expects=NO_IMAGES),
        Turn(READ_ANSWER, expects=LEVEL),
    ]


def _codex(folder: Path) -> Mapping[str, Sequence[Turn]]:
    patch = f"*** Begin Patch\n*** Update File: notes.txt\n@@\n-42\n+43 {MARKS[0]}\n*** End Patch"
    shell = "exec_command"
    reading = _reading(("", ""), ("view_image", "path"), "mcp__gauge__measure", folder)
    reading[0] = Turn("", shell, {"cmd": f"cat notes.txt # {MARKS[0]}"})
    return {
        READ: reading,
        PATCH: [
            Turn("", shell, {"cmd": f"apply_patch <<'EOP'\n{patch}\nEOP\n"}),
            Turn("", shell, {"cmd": f"cat notes.txt; echo {MARKS[1]}"}),
            Turn(PATCHED, expects=f"43 {MARKS[0]}"),
        ],
    }


def _claude_code(folder: Path) -> Mapping[str, Sequence[Turn]]:
    notes = str(folder / f"data/{MARKS[0]}.txt")  # it reads a file before it edits it
    path, measure = ("Read", "file_path"), "mcp__gauge__measure"
    read, look, *_ = _reading(path, path, measure, folder)
    return {
        READ: [
            read,
            look,
            # It defers the tools of servers until a search finds them.
            Turn("", "ToolSearch", {"query": f"+gauge measure {MARKS[2]}"}, expects=NO_IMAGES),
            Turn("", measure, {"gate": "north", "note": MARKS[3]}, expects="Measures the water"),
            Turn(READ_ANSWER, expects=LEVEL),
        ],
        PATCH: [
            Turn("", "Read", {"file_path": notes}),
            Turn(
                "", "Edit", {"file_path": notes, "old_string": "42", "new_string": f"43 {MARKS[1]}"}
            ),
            Turn("", "Bash", {"command": f"cat {notes} # {MARKS[2]}", "description": "Shows"}),
            Turn(PATCHED, expects=f"43 {MARKS[1]}"),
        ],
    }


def _opencode(folder: Path) -> Mapping[str, Sequence[Turn]]:
    notes = str(folder / "notes.txt")
    path = ("read", "filePath")
    return {
        READ: _reading(path, path, "gauge_measure", folder),
        PATCH: [
            Turn("", "bash", {"command": f"echo {MARKS[0]}", "description": "Marks"}),
            Turn("", "edit", {"filePath": notes, "oldString": "42", "newString": f"43 {MARKS[1]}"}),
            Turn("", "bash", {"command": f"cat notes.txt # {MARKS[2]}", "description": "Shows"}),
            Turn(PATCHED, expects=f"43 {MARKS[1]}"),
        ],
    }


def _aider(folder: Path) -> Mapping[str, Sequence[Turn]]:
    """Aider has no tools: its model writes whole files."""
    return {
        READ: [Turn(READ_ANSWER, expects="42")],
        PATCH: [Turn(f"{PATCHED}\n\nnotes.txt\n```\n43 {MARKS[1]}\n```\n")],
    }


TASKS = {"codex": _codex, "claude-code": _claude_code, "opencode": _opencode, "aider": _aider}
ANSWERS = {READ: READ_ANSWER, PATCH: PATCHED, REFUSE: REFUSAL}
# Each program meets each family, and each family each death.
RUNS = [
    (program, task, kills, FAMILIES[(3 * t + k + p) % len(FAMILIES)])
    for (p, program), (t, task), (k, kills) in product(
        enumerate(PROGRAMS), enumerate(ANSWERS), enumerate(KILLS)
    )
]


def _checkpoint(path: Path, family: str) -> Path:
    options = {"vocab_size": 640, "max_position_embeddings": 262_144}
    if family == "hermes":
        return make_hermes_checkpoint(path, **options)
    if family == "llama3":
        return make_llama3_checkpoint(path, **options)
    return make_family_checkpoint(path, family, **options)


@pytest.fixture
def script(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Place, Script, Launched]]:
    """A place for a program, and a service whose model follows its script."""
    program, kills, family = request.param
    folder = tmp_path / "work"
    tasks = {**TASKS[program](folder), REFUSE: [Turn(REFUSAL)]}
    checkpoint = _checkpoint(tmp_path / "model", family)
    made = Script(family, str(checkpoint), tasks, str(tmp_path), kills)
    made.save(tmp_path / "script.json")
    env = {
        "MODEL": str(checkpoint),
        "SERVED_MODEL_NAME": MODEL,
        "RUNNER": "echo",
        "ECHO_STEP_MS": "3",
        "NUM_KV_BLOCKS": "40000",
        "WORKERS": "2" if kills else "1",
        "LEASE_MS": "1500",
        "BEAT_INTERVAL_MS": "100",
        "PYTHONPATH": f"{FAULTS}:{REPOSITORY}",
        SCRIPT: str(tmp_path / "script.json"),
    }
    with Launched(tmp_path, env, is_forked=False) as penstock:
        place = Place.make(tmp_path, penstock.base_url)
        (folder / "notes.txt").write_text("42\n")
        (folder / "data").mkdir()
        (folder / f"data/{MARKS[0]}.txt").write_text("42\n")
        write_picture(folder / f"data/{MARKS[1]}.png")
        yield place, made, penstock


@pytest.mark.parametrize(
    ("program", "task", "script"),
    [
        pytest.param(
            program, task, (program, kills, family), id="-".join((program, task, family, kills))
        )
        for program, task, kills, family in RUNS
    ],
    indirect=["script"],
)
def test_a_program_does_its_task(
    script: tuple[Place, Script, Launched], program: str, task: str
) -> None:
    place, made, penstock = script
    output = PROGRAMS[program](place, f"{task}: what do the notes say?")
    assert ANSWERS[task] in output
    if task == PATCH:
        assert any("43" in path.read_text() for path in place.folder.rglob("*.txt"))
    killed = len(list(Path(made.directory).glob("*.killed")))
    assert killed >= (len(made.tasks[task]) if made.kills else 0)
    jobs = httpx.get(f"{penstock.base_url}/v1/jobs", params={"limit": 100}).json()["data"]
    ends = {job["status"] for job in jobs}
    assert ends <= {"finished"} | ({"cancelled"} if made.kills == "frontend" else set()), jobs
    if not made.kills:
        share = recomputed_share(penstock.base_url, [job["id"] for job in jobs])
        assert share <= MOST_RECOMPUTED


def recomputed_share(base_url: str, job_ids: Sequence[str]) -> float:
    """Returns the share of all prompt tokens that were computed though an earlier turn had them.

    Two causes are no turn's: another system message begins another conversation (a title), and a
    tool that Claude Code finds on the way changes the list at the prompt's beginning, once.
    """
    num_tokens, num_again = 0, 0
    for job_id in job_ids:
        url = f"{base_url}/v1/jobs/{job_id}"
        job = httpx.get(url, params={"prefix": "true"}, timeout=30).json()
        num_tokens += job["usage"]["prompt_tokens"]
        prefix = job["prefix"]
        if prefix["cause"] not in ("system", "tools"):
            uncached = max(0, prefix["same_tokens"] - prefix["cached_tokens"])
            num_again += prefix["lost_tokens"] + uncached
    return num_again / num_tokens
