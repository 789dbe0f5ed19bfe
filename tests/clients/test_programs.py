"""Codex, Claude Code, opencode and aider, as they are installed, do their tasks to the end.

Only the model is scripted (tests.support.scripted_model): its calls are parsed, run by the program,
and come back with the next turn, for the chat templates of six families. All runs are in
`make test-packages`, but ten sessions of each program, whose prefixes are measured (`make chaos`).
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
from tests.support.scripted_model import SCRIPT, SUMMARIZED, Script, Turn, step_mark
from tests.support.throttle import FAULTS
from tests.support.tool_models import (
    make_family_checkpoint,
    make_hermes_checkpoint,
    make_llama3_checkpoint,
)

LONG_TEXT = "".join(
    f"{k}: the level at gate {k % 7} was {k * 31 % 97} metres\n" for k in range(900)
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
MARKS = [step_mark(turn) for turn in range(1, 14)]
SESSIONS = 10
# A session that is summarized: the name of its task, what the summary says, and its end. For each
# program that does so, a text of its request for a summary, and the window that makes it ask.
COMPACT, SUMMARY, COMPACTED = "task-of-compacting", "They read a long text.", "That was all."
WINDOWS = {
    "codex": ("CHECKPOINT COMPACTION", 33_000),
    "claude-code": ("create a detailed summary of", 100_000),
    "opencode": ("anchored summary", 45_000),
}


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


def _long(program: str, step: int, folder: Path) -> Turn:
    """Reads a text of some five thousand tokens, or twenty thousand as Claude Code and opencode
    number its lines."""
    path = str(folder / f"long-{MARKS[step]}.txt")
    return {
        "codex": Turn("", "exec_command", {"cmd": f"cat {path}"}),
        "claude-code": Turn("", "Read", {"file_path": path}),
        "opencode": Turn("", "read", {"filePath": path}),
    }[program]


def _compacting(program: str, folder: Path) -> list[Turn]:
    """Reads long texts until the program has to summarize them, and goes on behind the summary."""
    return [*(_long(program, step, folder) for step in range(3)), Turn(COMPACTED, expects=SUMMARY)]


def _session(program: str, number: int) -> list[Turn]:
    """Returns a session of two to eight calls: commands with more output each time, and MCP."""
    last = Turn(f"Session {number} is done.")
    if program == "aider":
        return [last if number % 2 else Turn(f"{last.text}\n\nnotes.txt\n```\n{number}\n```\n")]
    turns: list[Turn] = []
    measure = "gauge_measure" if program == "opencode" else "mcp__gauge__measure"
    for step in range(2 + number % 6):
        mark = MARKS[len(turns)]
        if (number + step) % 3 == 1:
            if program == "claude-code" and not any(turn.tool == "ToolSearch" for turn in turns):
                turns.append(Turn("", "ToolSearch", {"query": f"+gauge measure {mark}"}))
                mark = MARKS[len(turns)]
            turns.append(Turn("", measure, {"gate": "north", "note": mark}))
            continue
        command = f"seq {number} {number + 20 * (step + 1)}; echo {mark}"
        turns.append(
            Turn("I look.", "exec_command", {"cmd": command})
            if program == "codex"
            else Turn(
                "I look.",
                "Bash" if program == "claude-code" else "bash",
                {"command": command, "description": "Counts"},
            )
        )
    return [*turns, last]


TASKS = {"codex": _codex, "claude-code": _claude_code, "opencode": _opencode, "aider": _aider}
ANSWERS = {READ: READ_ANSWER, PATCH: PATCHED, REFUSE: REFUSAL, COMPACT: COMPACTED}
TASK_NAMES = (READ, PATCH, REFUSE)
# Each program meets each family, and each family each death.
RUNS = [
    (program, task, kills, FAMILIES[(3 * t + k + p) % len(FAMILIES)])
    for (p, program), (t, task), (k, kills) in product(
        enumerate(PROGRAMS), enumerate(TASK_NAMES), enumerate(KILLS)
    )
]
RUNS += [
    (program, COMPACT, kills, FAMILIES[(k + p) % len(FAMILIES)])
    for (p, program), (k, kills) in product(enumerate(WINDOWS), enumerate(("", "worker")))
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
    program, task, kills, family = request.param
    folder = tmp_path / "work"
    tasks = {**TASKS[program](folder), REFUSE: [Turn(REFUSAL)]}
    tasks |= {f"session-{number}": _session(program, number) for number in range(SESSIONS)}
    asks, window = WINDOWS.get(program, ("", None))
    if program in WINDOWS:
        tasks[COMPACT] = _compacting(program, folder)
    checkpoint = _checkpoint(tmp_path / "model", family)
    made = Script(family, str(checkpoint), tasks, str(tmp_path), kills, asks, SUMMARY)
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
        window = window if task == COMPACT else None
        place = Place.make(tmp_path, penstock.base_url, window)
        for mark in MARKS[:3]:
            (folder / f"long-{mark}.txt").write_text(LONG_TEXT)
        (folder / "notes.txt").write_text("42\n")
        (folder / "data").mkdir()
        (folder / f"data/{MARKS[0]}.txt").write_text("42\n")
        write_picture(folder / f"data/{MARKS[1]}.png")
        yield place, made, penstock


@pytest.mark.parametrize(
    ("program", "task", "script"),
    [
        pytest.param(
            program,
            task,
            (program, task, kills, family),
            id="-".join((program, task, family, kills)),
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
    if task == COMPACT:
        assert (Path(made.directory) / SUMMARIZED).exists()
    elif not made.kills:
        num_again, num_tokens, causes = recomputed(penstock.base_url, {job["id"] for job in jobs})
        assert num_again <= MOST_RECOMPUTED * num_tokens, causes


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "script"),
    [
        pytest.param(program, (program, "", "", family), id=f"{program}-{family}")
        for program, family in zip(
            PROGRAMS, ("hermes", "qwen3-coder", "hermes", "mistral-named"), strict=True
        )
    ],
    indirect=["script"],
)
def test_ten_sessions_compute_few_of_their_prompt_tokens_again(
    script: tuple[Place, Script, Launched], program: str
) -> None:
    place, _, penstock = script
    seen: set[str] = set()
    total_again, total_tokens, told = 0, 0, []
    for number in range(SESSIONS):
        output = PROGRAMS[program](place, f"session-{number}: {'Count. ' * number}")
        assert f"Session {number} is done." in output
        jobs = httpx.get(f"{penstock.base_url}/v1/jobs", params={"limit": 100}).json()["data"]
        session = {job["id"] for job in jobs} - seen
        num_again, num_tokens, causes = recomputed(penstock.base_url, session)
        seen |= session
        total_again, total_tokens = total_again + num_again, total_tokens + num_tokens
        told.append((num_again, num_tokens, causes))
    assert total_again <= MOST_RECOMPUTED * total_tokens, told


def recomputed(base_url: str, session: set[str]) -> tuple[int, int, list[str]]:
    """Returns how many prompt tokens of a session were computed though an earlier prompt had them,
    of how many, and the causes.

    What an earlier prompt had behind the first difference counts where it is of this session, and
    not where the system message is another: a title's request is no turn of the conversation.
    """
    num_again, num_tokens, causes = 0, 0, []
    for job_id in sorted(session):
        url = f"{base_url}/v1/jobs/{job_id}"
        job = httpx.get(url, params={"prefix": "true"}, timeout=30).json()
        num_tokens += job["usage"]["prompt_tokens"]
        prefix = job["prefix"]
        again = max(0, prefix["same_tokens"] - prefix["cached_tokens"])
        if prefix["earlier_job"] in session and prefix["cause"] != "system":
            again += prefix["lost_tokens"]
        num_again += again
        causes.append(f"{prefix['cause']} {again}")
    return num_again, num_tokens, causes
