"""Exit codes of the command `penstock`, and the error that carries one to its end."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the command ends with; docs/CLI.md has the table."""

    OK = 0
    FAILED = 1
    UNUSABLE = 2
    NO_SERVICE = 3
    REFUSED = 4
    NOT_FOUND = 5
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """Returns the code's meaning, for docs/CLI.md."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "It did what it was asked to. `up`, `api`, `worker`: stopped by a signal.",
    ExitCode.FAILED: "It could not: the answer or the job ended with an error, a process could not "
    "be kept running, `doctor` found an error.",
    ExitCode.UNUSABLE: "A flag, a setting, a file, a model or an installation cannot be used, "
    "also where only the service can see it (400, 413, 422).",
    ExitCode.NO_SERVICE: "Nothing answers at the URL, or the connection ended.",
    ExitCode.REFUSED: "The service asks for a key, or the key does not permit this (401, 403).",
    ExitCode.NOT_FOUND: "There is no such job, dead letter or model (404), or the job has "
    "expired (410).",
    ExitCode.INTERRUPTED: "Ctrl-C, where that is not the way to stop.",
}


class CommandError(Exception):
    """The command ends with `code`; the text is a sentence for the user."""

    def __init__(self, sentence: str, code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(sentence)
        self.code = code
