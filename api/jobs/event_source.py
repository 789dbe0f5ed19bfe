"""AnswerStream: where an answer's events come from."""

from __future__ import annotations

from typing import Protocol

from shared.messages import Cursor, Delta, Failed, Finished


class AnswerStream(Protocol):
    """A JobStream, or several jobs' together."""

    @property
    def job_id(self) -> str:
        """Of the job that the answer is named by."""
        ...

    @property
    def cursor(self) -> Cursor: ...
    @property
    def started_s(self) -> float | None: ...
    @property
    def num_waiting(self) -> int:
        """As JobStream.num_waiting."""
        ...

    async def get(self, timeout_s: float) -> Delta | Finished | Failed | None:
        """As JobStream.get."""
        ...

    async def aclose(self) -> None: ...
