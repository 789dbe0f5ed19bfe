"""A model that plays an agent's part: its answer depends on how far the conversation has come.

The engine process of a worker whose environment has AGENT_SCRIPT (see tests/support/faults) runs a
ScriptedModel. Worker, log, queue and frontend are the real ones. A script has the tasks of one
program. A task is found by its name in the prompt, a turn by the highest step that the prompt has:
each answer but the last contains `step_mark(turn)`, which comes back with the history. So an answer
is a function of the prompt alone, and another worker continues it with the same tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tests.support.written_calls import WRITTEN

if TYPE_CHECKING:
    from worker.engine.batch import ScheduledSequence
    from worker.engine.config import EngineConfig
    from worker.engine.ports import ModelRunner
    from worker.engine_options import EngineOptions

SCRIPT = "AGENT_SCRIPT"  # names a file with the JSON of a Script
KILL_AT_TOKEN = 12  # of each answer, at its first attempt
SUMMARIZED = "summarized"
SIDE_ANSWER = "Levels of the lake"  # to what is no turn of a task: titles, summaries, topics


def step_mark(turn: int) -> str:
    """Returns the text by which the history shows that a turn has been answered."""
    return f"penstep-{turn}-mark"


@dataclass(frozen=True)
class Turn:
    """An answer: text, a call of a tool, or both. `expects` is a text that its prompt must have."""

    text: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    expects: str = ""


@dataclass(frozen=True)
class Script:
    """The tasks of a program, by the names that their prompts have.

    `family` is a key of `written_calls.WRITTEN`, `checkpoint` the directory of the model. `kills`
    is "worker" or "frontend": the process that is killed in the middle of each answer, once.
    `directory` has a file for each answer in which something was killed, and SUMMARIZED once a
    conversation was: a request for that has the text `summary_request`, and gets `summary`.
    """

    family: str
    checkpoint: str
    tasks: Mapping[str, Sequence[Turn]]
    directory: str
    kills: str = ""
    summary_request: str = ""
    summary: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Script:
        members = json.loads(path.read_text())
        tasks = {name: [Turn(**turn) for turn in turns] for name, turns in members["tasks"].items()}
        return cls(**{**members, "tasks": tasks})

    def answer(self, prompt: str) -> str:
        """Returns the text of the answer to a prompt, as the model's tokens have it."""
        turns = next((turns for name, turns in self.tasks.items() if name in prompt), None)
        tools = [turn.tool for turn in turns or () if turn.tool]
        done = max(map(int, re.findall(r"penstep-(\d+)-mark", prompt)), default=0)
        if self.summary_request and self.summary_request in prompt:
            (Path(self.directory) / SUMMARIZED).touch()
            names = [name for name in self.tasks if name in prompt]
            return f"<summary>{self.summary} {' '.join(names)} {step_mark(done)}</summary>"
        if turns is None or (tools and not any(tool in prompt for tool in tools)):
            return SIDE_ANSWER
        turn = turns[min(done, len(turns) - 1)]
        if turn.expects not in prompt:
            return f"The prompt lacks {turn.expects!r}: {prompt[-500:]}"
        if not turn.tool:
            return turn.text
        return turn.text + WRITTEN[self.family]([(turn.tool, json.dumps(dict(turn.arguments)))])


class ScriptedModel:
    """Chooses the tokens of a runner (`next_token`) from the answers of a script."""

    def __init__(self, script: Script, checkpoint: Path) -> None:
        self._script = script
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        config = json.loads((checkpoint / "config.json").read_text())
        self.eos_token_id = int(config["eos_token_id"])
        self._answers: dict[int, list[int]] = {}  # by sequence

    def next_token(self, sequence: ScheduledSequence) -> int:
        answer = self._answers.get(sequence.seq_id)
        if answer is None:
            prompt = self._tokenizer.decode(sequence.prompt_token_ids, skip_special_tokens=False)
            text = self._script.answer(prompt)
            answer = self._tokenizer.encode(text, add_special_tokens=False).ids
            self._answers[sequence.seq_id] = answer
        index = sequence.output_index
        if index == min(KILL_AT_TOKEN, len(answer) // 2):
            self._kill(sequence.prompt_token_ids)
        return answer[index] if index < len(answer) else self.eos_token_id

    def _kill(self, prompt_token_ids: Sequence[int]) -> None:
        """Kills what the script says, once for each prompt."""
        if not self._script.kills:
            return
        digest = hashlib.sha256(json.dumps(list(prompt_token_ids)).encode()).hexdigest()
        try:
            (Path(self._script.directory) / f"{digest[:16]}.killed").touch(exist_ok=False)
        except FileExistsError:
            return
        worker = os.getppid()
        if self._script.kills == "worker":
            os.kill(worker, signal.SIGKILL)
            time.sleep(60)  # this process ends with its parent
        for pid in _frontends(launcher=_parent_of(worker)):
            os.kill(pid, signal.SIGKILL)


def _frontends(launcher: int) -> list[int]:
    """Returns the process ids of a launcher's frontends."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                if arguments[1:3] == [b"-m", b"api"] and _parent_of(int(process.name)) == launcher:
                    found.append(int(process.name))
    return found


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def play(path: str) -> None:
    """Makes the echo engine of this process follow the script in a file."""
    from worker.engines import penstock
    from worker.engines.echo import EchoModelRunner

    script = Script.load(Path(path))
    model = ScriptedModel(script, Path(script.checkpoint))
    build = penstock.echo_runner

    def build_with_end(options: EngineOptions) -> tuple[EngineConfig, ModelRunner]:
        config, runner = build(options)
        return replace(config, eos_token_ids=frozenset({model.eos_token_id})), runner

    def next_token(self: EchoModelRunner, sequence: ScheduledSequence) -> int:
        return model.next_token(sequence)

    penstock.echo_runner = build_with_end
    EchoModelRunner._next_token = next_token  # type: ignore[method-assign]
