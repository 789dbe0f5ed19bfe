"""Reads an answer: the request of each connection, and the delta of each event. No network.

A submitted answer is requested again with its idempotency key: the service repeats it from its
start, and the delivered part is left out. An answer in the background resumes after the number, a
job's log after the id, of the last event read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.client.answer import Answer, Choice, Delta
from penstock.client.errors import (
    NotFound,
    PenstockError,
    StreamLost,
    Unreachable,
    job_failure,
    stream_loss,
)
from penstock.client.kept import KeptChoice, is_empty
from penstock.client.requests import IDEMPOTENCY_KEY, Event, Request, in_path, new_key

# The job is lost before any of it was delivered: the same request starts it again.
_BEGINS_ANEW = frozenset(
    {"worker_lost", "engine_died", "payload_lost", "job_lost", "model_replaced"}
)
_LOST = frozenset({"job_lost", "job_expired", "stream_diverged"})
_PASSING_KINDS = frozenset({"service_unavailable", "overloaded_error", "rate_limit_error"})
_ENDS = frozenset({"completed", "incomplete", "failed", "cancelled"})


class Reading(ABC):
    """One answer, over as many connections as it takes.

    `is_over` after its last event; `failure` is then the error that it ended with. `cancels`:
    leaving it early cancels its job. `needs_model`: `choose` has to be called first.
    """

    cancels = False
    needs_model = False

    def __init__(self, job_id: str = "") -> None:
        self.job_id = job_id
        self.is_over = False
        self.has_begun = False
        self.failure: PenstockError | None = None

    @abstractmethod
    def request(self) -> Request:
        """Returns the request of the next connection."""

    @abstractmethod
    def take(self, event: Event) -> Sequence[Delta]:
        """Returns the deltas of an event. Raises PenstockError if the stream ends early."""

    @property
    @abstractmethod
    def answer(self) -> Answer:
        """The answer read so far."""

    def choose(self, model: str) -> None:
        """Names the model that serves it."""
        raise NotImplementedError

    def opened(self, request_id: str) -> None:
        """Records the request id once the stream is open, for readers that stop before an event."""
        self.job_id = self.job_id or request_id

    def may_pass(self, error: PenstockError) -> bool:
        """Returns whether another connection may continue after `error`. A known job may be missing
        for a while: at a frontend that has just started, after a loss of Redis."""
        return error.may_pass or (self.has_begun and isinstance(error, NotFound))

    def ended_early(self) -> Unreachable:
        """Returns the error of a connection that ended before the answer did."""
        return Unreachable("the stream ended before the answer did.", self.job_id)

    def _fail(self, failure: PenstockError) -> None:
        self.failure = failure
        self.is_over = True


class SubmittedReading(Reading):
    """An answer that its own request submits, in one of three dialects."""

    cancels = True

    def __init__(
        self, path: str, body: Mapping[str, Any], *, key: str | None = None, needs_model: bool
    ) -> None:
        super().__init__()
        self.needs_model = needs_model
        self._path = path
        self._body = {"on_disconnect": "continue", **body, "stream": True}
        self._headers = {IDEMPOTENCY_KEY: key or new_key()}
        self._choices: dict[int, KeptChoice] = {}
        self._is_repeat = False
        self._model = str(body.get("model", ""))
        self._usage: Mapping[str, Any] = {}
        self._metrics: Mapping[str, Any] | None = None

    def choose(self, model: str) -> None:
        self._body["model"] = model
        self.needs_model = False

    def request(self) -> Request:
        self._is_repeat = self.has_begun
        for choice in self._choices.values():
            choice.repeat()
        return Request("POST", self._path, self._body, headers=self._headers)

    def take(self, event: Event) -> Sequence[Delta]:
        data = event.data
        if data is None:
            self.is_over = True
            return ()
        if error := data.get("error"):
            self._take_error(error)
            return (Delta(event=data),)
        self._meet(data)
        self._usage = data.get("usage") or self._usage
        self._metrics = data.get("metrics") or self._metrics
        if "choices" not in data:
            deltas = [self._take_generated(data)]
        else:
            deltas = [self._take_choice(choice, data) for choice in data["choices"]]
        return [delta for delta in deltas if not (self._is_repeat and is_empty(delta))]

    @property
    def answer(self) -> Answer:
        choices = tuple(choice.whole for _, choice in sorted(self._choices.items()))
        return Answer(self.job_id, self._model, choices, self._usage, self._metrics)

    @property
    def _has_delivered(self) -> bool:
        return any(choice.whole != Choice() for choice in self._choices.values())

    def _meet(self, data: Mapping[str, Any]) -> None:
        """Records the job of the stream. Raises StreamLost if it is another than before."""
        self._model = str(data.get("model") or self._model)
        before, name = self.job_id, str(data.get("id") or self.job_id)
        self.job_id, self.has_begun = name, True
        if before and name != before and self._has_delivered:
            raise StreamLost(
                f"The job {before} of this answer is gone, and its text cannot be continued.",
                job_id=before,
            )

    def _take_error(self, error: Mapping[str, Any]) -> None:
        """Notes how the job ended. Raises Unreachable where only the stream did."""
        message, code = str(error.get("message")), error.get("code")
        begins_anew = code in _BEGINS_ANEW and not self._has_delivered
        if code in _LOST and not begins_anew:
            self._fail(stream_loss(message, code, self.job_id))
        elif begins_anew:
            raise job_failure(message, code, self.job_id, may_pass=True)
        elif error.get("type") in _PASSING_KINDS or code == "internal_error":
            raise Unreachable(message, self.job_id)
        else:
            self._fail(job_failure(message, code, self.job_id))

    def _take_choice(self, given: Mapping[str, Any], data: Mapping[str, Any]) -> Delta:
        delta = given.get("delta") or {}
        return self._choice(given["index"]).take(
            data,
            text=given.get("text") or delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or "",
            tool_calls=delta.get("tool_calls") or (),
            token_ids=given.get("token_ids") or (),
            logprobs=given.get("logprobs"),
            finish_reason=given.get("finish_reason"),
            stop_reason=given.get("stop_reason"),
        )

    def _take_generated(self, data: Mapping[str, Any]) -> Delta:
        return self._choice(0).take(
            data,
            text=data["text"],
            token_ids=data["token_ids"],
            finish_reason=data.get("finish_reason"),
            stop_reason=data.get("stop_reason"),
        )

    def _choice(self, index: int) -> KeptChoice:
        return self._choices.setdefault(index, KeptChoice(index))


class BackgroundReading(Reading):
    """A response that `submit` created."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self._last: int | None = None
        self._choice = KeptChoice(0)
        self._response: Mapping[str, Any] = {}

    def request(self) -> Request:
        query = {"stream": "true"}
        if self._last is not None:
            query["starting_after"] = str(self._last)
        return Request("GET", f"/v1/responses/{in_path(self.job_id)}", query=query)

    def take(self, event: Event) -> Sequence[Delta]:
        data = event.data
        if data is None:
            return ()
        kind = data["type"]
        if kind == "error":
            self._take_error(data)
            return (Delta(event=data),)
        self.has_begun = True
        self._last = data.get("sequence_number", self._last)
        self._response = data.get("response") or self._response
        is_text = kind == "response.output_text.delta"
        is_reasoning = kind == "response.reasoning_text.delta"
        is_end = kind.removeprefix("response.") in _ENDS
        if is_end:
            self._end()
        return (
            self._choice.take(
                data,
                text=data["delta"] if is_text else "",
                reasoning=data["delta"] if is_reasoning else "",
                finish_reason=_finish_reason(self._response) if is_end else None,
            ),
        )

    @property
    def answer(self) -> Answer:
        read, response = self._choice.whole, self._response
        calls = tuple(
            {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            for item in response.get("output", ())
            if item["type"] == "function_call"
        )
        choice = Choice(read.text, read.reasoning, calls, finish_reason=read.finish_reason)
        model, usage = str(response.get("model", "")), response.get("usage") or {}
        return Answer(self.job_id, model, (choice,), usage)

    def _take_error(self, data: Mapping[str, Any]) -> None:
        message, code = str(data.get("message")), data.get("code")
        if code not in _LOST:
            raise Unreachable(message, self.job_id)
        self._fail(stream_loss(message, code, self.job_id))

    def _end(self) -> None:
        self.is_over = True
        status, error = self._response["status"], self._response.get("error") or {}
        if status not in ("completed", "incomplete"):
            message = error.get("message") or f"the answer is {status}."
            code = "cancelled" if status == "cancelled" else error.get("type") or error.get("code")
            self.failure = job_failure(message, code, self.job_id)


class LogReading(Reading):
    """The log of a job, in any dialect: its text as the model wrote it, calls and reasoning too."""

    def __init__(self, job_id: str, after: str = "") -> None:
        super().__init__(job_id)
        self._after = after
        self._choices: dict[int, KeptChoice] = {}
        self._usage: Mapping[str, Any] = {}

    def request(self) -> Request:
        query = {"after": self._after} if self._after else {}
        return Request("GET", f"/v1/jobs/{in_path(self.job_id)}/stream", query=query)

    def take(self, event: Event) -> Sequence[Delta]:
        data = event.data
        if data is None:
            self.is_over = True
            return ()
        if error := data.get("error"):
            self._take_error(error, is_end=event.id not in ("", self._after))
            return (Delta(event=data),)
        self.has_begun = True
        self._after = event.id or self._after
        self._usage = data.get("usage") or self._usage
        if data.get("done"):
            self.is_over = True
        index = data.get("index", 0)
        choice = self._choices.setdefault(index, KeptChoice(index))
        return (
            choice.take(
                data,
                text=data["text"],
                token_ids=data["token_ids"],
                finish_reason=data.get("finish_reason"),
                stop_reason=data.get("stop_reason"),
            ),
        )

    @property
    def answer(self) -> Answer:
        choices = tuple(choice.whole for _, choice in sorted(self._choices.items()))
        return Answer(self.job_id, "", choices, self._usage)

    def _take_error(self, error: Mapping[str, Any], *, is_end: bool) -> None:
        """Records the error of the job, which has its own id. Raises Unreachable if only the stream
        failed."""
        message, code = str(error.get("message")), error.get("code")
        if is_end:
            self._fail(job_failure(message, code, self.job_id))
        elif code in _LOST:
            self._fail(stream_loss(message, code, self.job_id))
        else:
            raise Unreachable(message, self.job_id)


def _finish_reason(response: Mapping[str, Any]) -> str | None:
    """Returns chat's finish reason of a response; None if it failed."""
    if response["status"] == "completed":
        has_calls = any(item["type"] == "function_call" for item in response.get("output", ()))
        return "tool_calls" if has_calls else "stop"
    return "length" if response["status"] == "incomplete" else None
