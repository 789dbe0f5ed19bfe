"""`penstock chat`: a conversation in the terminal. An answer continues where it was after a lost
connection, at any frontend."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.live import StreamedMarkdown
from penstock.cli.options import DEFAULT_PATIENCE_S, DEFAULT_URL, Json, Key, ModelName, Url
from penstock.cli.options import Patience as PatienceOption
from penstock.cli.output import note, note_recovery, print_dimmed, print_json, print_text
from penstock.cli.service import chosen_model, client_of, exit_code_of
from penstock.client import Client, Delta, PenstockError
from penstock.client.requests import LEAVING_S, in_path

# What ends a conversation: no further question would be answered.
_LASTING = (ExitCode.REFUSED, ExitCode.NO_SERVICE)
HELP = "/new starts over, /model NAME asks another model, /exit or Ctrl-D ends, Ctrl-C cancels."
_COMMAND = re.compile(r"/[a-z]+( \S+)?")
_OPTIONS = ("max_output_tokens", "temperature")  # as the service names them


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
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    reasoning: Annotated[
        bool, typer.Option("--reasoning/--no-reasoning", help="Show the model's reasoning.")
    ] = True,
    markdown: Annotated[
        bool, typer.Option("--markdown/--plain", help="Render Markdown, at a terminal.")
    ] = True,
    patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Chats with a model. Ctrl-C cancels the answer; /help lists what a conversation can do.

    Ends with 1 where an answer failed, and it was the only question.
    """
    client = client_of(url, key, patience_s=patience, on_recovery=note_recovery)
    name = chosen_model(client, model)
    options: dict[str, Any] = {
        "model": name,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "instructions": system,
    }
    body = {member: value for member, value in options.items() if value is not None}
    renders = markdown and not json and sys.stdout.isatty()
    conversation = Conversation(
        client, body, as_json=json, shows_reasoning=reasoning, renders=renders
    )
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read()
    if question is not None:
        if not question.strip():
            raise CommandError("the question is empty.", ExitCode.UNUSABLE)
        conversation.ask(question)
        return
    note(f"{name} at {client.url}. /help lists the commands, Ctrl-D ends.")
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
        if _COMMAND.fullmatch(line):
            _command(conversation, *line.split())
        elif line:
            try:
                conversation.ask(line)
            except (CommandError, PenstockError) as error:
                is_option = getattr(error, "param", None) in _OPTIONS
                if exit_code_of(error) in _LASTING or is_option:
                    raise
                note(str(error))


def _command(conversation: Conversation, name: str, *words: str) -> None:
    if name == "/new":
        conversation.clear()
    elif name == "/model" and words:
        conversation.use(words[0])
        note(f"the next answers are from {words[0]}.")
    elif name == "/help":
        note(HELP)
    else:
        note(f"{name} is no command. {HELP}")


class Conversation:
    """Questions and answers so far, which each further question is sent with."""

    def __init__(
        self,
        client: Client,
        body: dict[str, Any],
        *,
        as_json: bool,
        shows_reasoning: bool,
        renders: bool = False,
    ) -> None:
        self._client = client
        self._body = body
        self._as_json = as_json
        self._shows_reasoning = shows_reasoning
        self._turns: list[dict[str, str]] = []
        self._reasons = False  # reasoning was printed last
        self._renders = renders
        self._markdown: StreamedMarkdown | None = None

    def use(self, model: str) -> None:
        """Asks another model from now on."""
        self._body["model"] = model

    def clear(self) -> None:
        """Forgets the turns so far."""
        self._turns.clear()

    def ask(self, question: str) -> None:
        """Sends a question and prints its answer; both are then part of the conversation.

        The answer is created in the background, so that it belongs to no connection, and read from
        there. Ctrl-C cancels it. Raises CommandError and PenstockError.
        """
        turns = [*self._turns, {"role": "user", "content": question}]
        response_id = self._client.submit(turns, **self._body)
        try:
            text = self._follow(response_id)
        except KeyboardInterrupt:
            path = f"/v1/jobs/{in_path(response_id)}"
            self._client.call("DELETE", path, patience_s=LEAVING_S)
            raise CommandError("the answer was cancelled.", ExitCode.INTERRUPTED) from None
        self._turns = [*turns, {"role": "assistant", "content": text}]

    def _follow(self, response_id: str) -> str:
        """Prints the answer to its end; returns its text. Raises PenstockError."""
        self._reasons = False
        self._markdown = StreamedMarkdown() if self._renders else None
        stream = self._client.follow(response_id)
        last = Delta()
        try:
            for last in stream:
                self._print(last)
        finally:
            if self._markdown is not None:
                self._markdown.close()
                if self._reasons:  # and no text after it
                    print_text("\n")
            elif not self._as_json:
                print_text("\n")
        details = last.event["response"].get("incomplete_details") or {}
        if details:
            note(f"the answer is cut off: {details.get('reason')}")
        return stream.answer.text

    def _print(self, delta: Delta) -> None:
        if self._as_json:
            print_json(delta.event)
            return
        if delta.reasoning and self._shows_reasoning:
            if self._markdown is not None and not self._reasons:
                self._markdown.close()  # the text before it
            print_dimmed(delta.reasoning)
            self._reasons = True
        if delta.text:
            if self._reasons:
                print_text("\n\n")
                self._reasons = False
            if self._markdown is not None:
                self._markdown.add(delta.text)
            else:
                print_text(delta.text)
