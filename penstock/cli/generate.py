"""`penstock generate FILE`: many prompts through the service, one line of JSON for each."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from penstock.cli.exits import CommandError, ExitCode
from penstock.cli.live import Counted
from penstock.cli.options import DEFAULT_PATIENCE_S, DEFAULT_URL, Json, Key, ModelName, Url
from penstock.cli.options import Patience as PatienceOption
from penstock.cli.output import note
from penstock.cli.service import chosen_model, client_of
from penstock.client import Client, PenstockError
from penstock.client.requests import new_key
from shared.printable import printable

EMBEDDINGS = "/v1/embeddings"
PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": EMBEDDINGS,
}
ANSWER_TIMEOUT_S = 3600.0
LISTED_JOBS = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the file."""

    index: int
    custom_id: str | None
    path: str
    body: dict[str, Any]
    options: frozenset[str] = frozenset()  # parameters that the command's flags gave


def generate(
    file: Annotated[
        Path,
        typer.Argument(
            help="A prompt a line; or, in a .jsonl file, a request a line: an object with "
            "`prompt`, `messages` or `input` and any parameters, or a line of OpenAI's Batch API. "
            "-: stdin."
        ),
    ],
    url: Url = DEFAULT_URL,
    key: Key = None,
    json: Json = False,
    model: ModelName = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Without it: stdout.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Default for requests that do not set it.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Default for requests that do not set it.")
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Writes the embedding of each line instead of text.")
    ] = False,
    at_once: Annotated[int, typer.Option(min=1, max=1024, help="Requests under way.")] = 16,
    patience: PatienceOption = DEFAULT_PATIENCE_S,
) -> None:
    """Sends each request of a file and writes a line for each, in the file's order.

    A line without a JSON object in it is a prompt, which the model continues; of a plain text file
    each line is one. A request whose connection is lost is sent again with its idempotency key: it
    is computed once. Ends with 1 where one failed, with 2 where
    the service refused a flag's value.
    """
    text = _text(file)
    client = client_of(url, key, patience_s=patience, timeout_s=ANSWER_TIMEOUT_S)
    options = {"max_tokens": max_tokens, "temperature": temperature}
    defaults: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if embed and defaults:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in defaults)
        raise CommandError(f"--embed generates no text: leave out {named}.", ExitCode.UNUSABLE)
    defaults["model"] = chosen_model(client, model, embeds=embed)
    rows = list(_rows(file, text, defaults, "input" if embed else "prompt"))
    run = _Run(client, at_once, tells_rescues=not json)
    try:
        num_failed = run.write(rows, output)
    except OSError as error:
        raise CommandError(
            f"{output} cannot be written: {error.strerror}.", ExitCode.UNUSABLE
        ) from None
    if not json:
        note(f"{len(rows) - num_failed} of {len(rows)} finished{run.rescues}")
    if num_failed:
        code = ExitCode.UNUSABLE if run.has_bad_option else ExitCode.FAILED
        raise CommandError(f"{num_failed} of {len(rows)} requests failed.", code)


class _Run:
    def __init__(self, client: Client, at_once: int, *, tells_rescues: bool) -> None:
        self._tells_rescues = tells_rescues
        self._client = client
        self._at_once = at_once
        self.has_bad_option = False  # the service refused the value of a flag
        self.rescues = ""  # what became of jobs whose worker was lost

    def write(self, rows: list[Row], output: Path | None) -> int:
        """Writes the results in order; returns how many are errors."""
        if output is None:
            return self._write(rows, sys.stdout)
        with output.open("w", encoding="utf-8") as file:
            return self._write(rows, file)

    def _write(self, rows: list[Row], file: TextIO) -> int:
        num_failed = 0
        pool = ThreadPoolExecutor(self._at_once)
        futures: list[Future[dict[str, Any]]] = [pool.submit(self._result, row) for row in rows]
        try:
            # Between lines of results a bar would be in their way.
            has_bar = file is not sys.stdout or not sys.stdout.isatty()
            with Counted(len(rows), has_bar=has_bar) as progress:
                for future in futures:
                    future.add_done_callback(lambda ended: progress.add(_num_tokens(ended)))
                for future in futures:
                    result = future.result()
                    num_failed += "error" in result
                    file.write(printable(json_module.dumps(result, ensure_ascii=False)) + "\n")
                    file.flush()
            if self._tells_rescues:
                self.rescues = self._rescues({future.result().get("job") for future in futures})
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._client.close()  # after Ctrl-C: the rest is not sent
        return num_failed

    def _rescues(self, names: set[str | None]) -> str:
        """Returns how many of the jobs a worker lost, "" for none; of the newest jobs that the
        service still has."""
        try:
            found = self._client.jobs(limit=LISTED_JOBS)
        except PenstockError as error:
            return f"; whether workers were lost is not known: {error}"
        num_lost = sum(
            any(attempt["outcome"] == "died" for attempt in job["attempts"])
            for job in found
            if job["id"] in names
        )
        return f"; {num_lost} lost a worker and resumed on another one" if num_lost else ""

    def _result(self, row: Row) -> dict[str, Any]:
        named: dict[str, Any] = {"index": row.index}
        if row.custom_id is not None:
            named["custom_id"] = row.custom_id
        try:
            answer = self._client.call("POST", row.path, row.body, idempotency_key=new_key())
        except PenstockError as error:
            self.has_bad_option |= getattr(error, "param", None) in row.options
            return {**named, "error": str(error)}
        if row.path == EMBEDDINGS:
            vectors = [one["embedding"] for one in answer["data"]]
            is_one = isinstance(row.body["input"], str)
            named |= {"embedding": vectors[0]} if is_one else {"embeddings": vectors}
            return {**named, "usage": answer["usage"]}
        (choice, *_) = answer["choices"]
        message = choice.get("message")
        text = choice.get("text") if message is None else message.get("content")
        found = {**named, "job": answer["id"], "text": text, "usage": answer.get("usage")}
        found["finish_reason"] = choice.get("finish_reason")
        if len(answer["choices"]) > 1 or (message or {}).get("tool_calls"):
            found["choices"] = answer["choices"]
        return found


def _num_tokens(ended: Future[dict[str, Any]]) -> int:
    """Returns the tokens of a result; 0 of one that failed or was not sent."""
    if ended.cancelled() or ended.exception() is not None:
        return 0
    usage = ended.result().get("usage") or {}
    return int(usage.get("completion_tokens") or 0)


def _text(file: Path) -> str:
    """Returns the text of a file, or of stdin. Raises CommandError."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.", ExitCode.UNUSABLE) from None
    except UnicodeDecodeError:
        raise CommandError(f"{file} is no UTF-8 text.", ExitCode.UNUSABLE) from None


def _rows(file: Path, text: str, defaults: dict[str, Any], member: str) -> Iterator[Row]:
    """Yields the requests of a file; a line of text is their `member`. Raises CommandError."""
    index = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _row(f"{file}, line {number}", index, line, defaults, member)
            index += 1
    if not index:
        raise CommandError(f"{file} has no prompt.", ExitCode.UNUSABLE)


def _row(where: str, index: int, line: str, defaults: dict[str, Any], member: str) -> Row:
    if not line.lstrip().startswith("{"):
        body = {**defaults, member: line}
        return Row(index, None, PATHS[member], body, frozenset(defaults))
    try:
        given = json_module.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is no JSON: {error}.", ExitCode.UNUSABLE) from None
    custom_id = given.pop("custom_id", None)
    path = None
    if "body" in given and "url" in given:  # a line of the Batch API
        path, given = given["url"], given["body"]
        if path not in PATHS.values():
            raise CommandError(
                f"{where}: url must be one of {', '.join(PATHS.values())}.", ExitCode.UNUSABLE
            )
    kinds = [name for name in PATHS if name in given]
    if len(kinds) != 1:
        raise CommandError(
            f"{where} needs one of {', '.join(f'`{name}`' for name in PATHS)}.", ExitCode.UNUSABLE
        )
    if given.get("stream"):
        raise CommandError(f"{where}: stream is of no use in a file.", ExitCode.UNUSABLE)
    named = {name: value for name, value in defaults.items() if not _has(given, name)}
    body = {**named, **given}
    return Row(index, custom_id, path or PATHS[kinds[0]], body, frozenset(named))


def _has(given: dict[str, Any], name: str) -> bool:
    return name in given or (name == "max_tokens" and "max_completion_tokens" in given)
