"""`penstock chat`: a conversation in the terminal. An answer goes on where it was after a lost
connection, at any frontend."""

from __future__ import annotations

import sys
import uuid
from typing import Annotated, Any

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.frontend import Frontend, Patience, ServiceRefused, Unreachable, in_path
from penstock.cli.models import chosen_model
from penstock.cli.options import DEFAULT_PATIENCE_S, DEFAULT_URL, Json, Key, ModelName, Url
from penstock.cli.options import Patience as PatienceOption
from penstock.cli.output import note, print_json, print_text

LASTING = frozenset({"job_lost", "stream_diverged"})
_ENDS = frozenset(
    {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
    }
)


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Asked once; without it: a conversation, or stdin.")
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    reasoning: Annotated[
        bool, typer.Option("--reasoning/--no-reasoning", help="Show the model's reasoning.")
    ] = True,
    patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Chats with a model. Ctrl-C cancels the answer; /new starts over, Ctrl-D or /exit ends.

    Ends with 1 where an answer failed, and it was the only question.
    """
    frontend = Frontend(url, key)
    name = chosen_model(frontend, model)
    options: dict[str, Any] = {
        "model": name,
        "max_output_tokens": max_tokens,
        "temperature": temperature,
        "instructions": system,
    }
    body = {member: value for member, value in options.items() if value is not None}
    conversation = Conversation(
        frontend, body, as_json=json, shows_reasoning=reasoning, patience_s=patience
    )
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None:
        if not question.strip():
            raise CommandError("the question is empty.", ExitCode.UNUSABLE)
        conversation.ask(question)
        return
    note(f"{name} at {frontend.url}. /new starts over, Ctrl-D or /exit ends.")
    _converse(conversation)


def _converse(conversation: Conversation) -> None:
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print_text("\n")
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            conversation.clear()
        elif line:
            try:
                conversation.ask(line)
            except CommandError as error:
                if error.code in (ExitCode.REFUSED, ExitCode.NO_SERVICE):
                    raise
                note(str(error))


class Conversation:
    """Questions and answers so far, which each further question is sent with."""

    def __init__(
        self,
        frontend: Frontend,
        body: dict[str, Any],
        *,
        as_json: bool,
        shows_reasoning: bool,
        patience_s: float,
    ) -> None:
        self._frontend = frontend
        self._body = body
        self._as_json = as_json
        self._shows_reasoning = shows_reasoning
        self._patience_s = patience_s
        self._turns: list[dict[str, str]] = []
        self._reasons = False  # reasoning was printed last

    def clear(self) -> None:
        """Forgets the turns so far."""
        self._turns.clear()

    def ask(self, question: str) -> None:
        """Sends a question and prints its answer; both are then part of the conversation.

        The answer is created in the background, so that it belongs to no connection, and read from
        there. Ctrl-C cancels it. Raises CommandError.
        """
        turns = [*self._turns, {"role": "user", "content": question}]
        response_id = self._create({**self._body, "input": turns, "background": True})
        try:
            text = self._follow(response_id)
        except KeyboardInterrupt:
            self._frontend.ask("POST", f"{_path(response_id)}/cancel")
            print_text("\n")
            raise CommandError("the answer was cancelled.", ExitCode.INTERRUPTED) from None
        self._turns = [*turns, {"role": "assistant", "content": text}]

    def _create(self, body: dict[str, Any]) -> str:
        """Sends it until it is accepted; with one key, so that it is accepted once."""
        headers, retry = {"idempotency-key": str(uuid.uuid4())}, Patience(self._patience_s)
        while True:
            try:
                answer = self._frontend.ask("POST", "/v1/responses", body, headers=headers)
                return str(answer["id"])
            except Unreachable as error:
                retry.wait(error)

    def _follow(self, response_id: str) -> str:
        """Prints the answer to its end; returns its text. Raises CommandError."""
        last, parts, retry = -1, list[str](), Patience(self._patience_s)
        while True:
            query = {"stream": "true", "starting_after": last if last >= 0 else None}
            try:
                for event in self._frontend.events("GET", _path(response_id), query=query):
                    data = event.data or {}
                    if data.get("type") == "error":
                        raise _stream_error(data)
                    retry.restart()
                    last = data.get("sequence_number", last)
                    self._print(data)
                    if data["type"] == "response.output_text.delta":
                        parts.append(data["delta"])
                    if data["type"] in _ENDS:
                        self._end(data["response"])
                        return "".join(parts)
                raise Unreachable("the stream ended before the answer did.")
            except Unreachable as error:
                retry.wait(error)
            except ServiceRefused as error:
                if error.status < 500:
                    raise
                retry.wait(error)

    def _print(self, data: dict[str, Any]) -> None:
        if self._as_json:
            print_json(data)
            return
        kind = data["type"]
        if kind == "response.reasoning_text.delta" and self._shows_reasoning:
            dim = "\x1b[2m{}\x1b[22m" if sys.stdout.isatty() else "{}"
            print_text(dim.format(data["delta"]))
            self._reasons = True
        elif kind == "response.output_text.delta":
            if self._reasons:
                print_text("\n\n")
                self._reasons = False
            print_text(data["delta"])

    def _end(self, response: dict[str, Any]) -> None:
        """Raises CommandError where the answer failed."""
        self._reasons = False
        if not self._as_json:
            print_text("\n")
        status = response["status"]
        if status == "incomplete":
            why = (response.get("incomplete_details") or {}).get("reason")
            note(f"the answer is cut off: {why}")
        elif status != "completed":
            error = response.get("error") or {}
            raise CommandError(error.get("message") or f"the answer is {status}.")


def _stream_error(data: dict[str, Any]) -> CommandError:
    message = str(data.get("message") or "the stream ended with an error.")
    return CommandError(message) if data.get("code") in LASTING else Unreachable(message)


def _path(response_id: str) -> str:
    return f"/v1/responses/{in_path(response_id)}"
