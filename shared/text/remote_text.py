"""The tokenizer and the grammars of a model whose vocabulary a process beside this one holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from shared.messages import Grammar, InvalidParameter
from shared.text.base import RenderingUnavailable, TextInvalid
from shared.text.chat_template import PASSED_ON
from shared.text.model_card import ModelCard, missing_file
from shared.text.rendering import receive, send
from shared.text.text_requests import (
    CheckCall,
    EncodeCall,
    LoadRequest,
    TextCall,
    TextReply,
    TokenIdCall,
    Vocabulary,
)
from shared.text.tokenizer import PieceTokenizer, check_encodable

MAX_LOAD_SECONDS = 180.0
MAX_CALL_SECONDS = 60.0
_LOST = (OSError, EOFError, msgspec.MsgspecError)


class TextProcess:
    """The process of one model's text, started again when it has ended. Safe on several threads."""

    def __init__(self, card: ModelCard, blobs: Mapping[str, bytes]) -> None:
        """Raises TextInvalid as `load_text` does, and RenderingUnavailable."""
        for digest in card.digests:
            if digest not in blobs:
                raise TextInvalid(missing_file(digest))
        self._load = LoadRequest(card.to_json().decode(), list(card.digests))
        self._blobs = [blobs[digest] for digest in card.digests]
        self._lock = threading.Lock()
        self._running: list[_Running] = []  # at most one
        self._is_closed = False
        weakref.finalize(self, _end, self._running)
        self.vocabulary, self.tables = self._started().answer

    def call(self, call: TextCall) -> TextReply:
        """Raises RenderingUnavailable where the process ends over it twice, or stands still."""
        data = msgspec.json.encode(call)
        for _ in range(2):
            running = self._started()
            try:
                return running.exchange(data)
            except _LOST as error:
                self._drop(running)
                if isinstance(error, TimeoutError):
                    break
        raise RenderingUnavailable("the process of the model's tokenizer ended or stood still")

    @property
    def pid(self) -> int:
        return self._started().pid

    def close(self) -> None:
        """Ends the process; later calls raise RenderingUnavailable. Idempotent."""
        with self._lock:
            self._is_closed = True
            _end(self._running)

    def _started(self) -> _Running:
        with self._lock:
            if self._is_closed:
                raise RenderingUnavailable("the process of the model's tokenizer is closed")
            if not self._running:
                try:
                    self._running.append(_Running(self._load, self._blobs))
                except _LOST as error:
                    raise RenderingUnavailable(
                        f"no process can load the model's tokenizer: {error}"
                    ) from None
            return self._running[0]

    def _drop(self, running: _Running) -> None:
        with self._lock:
            if running in self._running:
                _end(self._running)


class _Tables(NamedTuple):
    """Bytes of all tokens, in front of a text and elsewhere, and where each ends."""

    first: bytes
    first_ends: array[int]
    other: bytes
    other_ends: array[int]


class _Running:
    """A process that has loaded the text."""

    def __init__(self, load: LoadRequest, blobs: list[bytes]) -> None:
        """Raises OSError, EOFError and MsgspecError where it does not, and TextInvalid."""
        self._control, theirs = socket.socketpair()
        self._idle: list[socket.socket] = []
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "shared.text.text_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a traceback may have a prompt in it
                    env={**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,  # a signal to the frontend's group leaves it alone
                )
        except OSError:
            self._control.close()
            raise
        try:
            self.answer = self._loaded(load, blobs)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, data: bytes) -> TextReply:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        try:
            send(connection, data)
            reply = msgspec.json.decode(_received(connection), type=TextReply)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return reply

    def end(self) -> None:
        self._control.close()
        while self._idle:
            self._idle.pop().close()
        self._process.kill()
        self._process.wait()

    def _loaded(self, load: LoadRequest, blobs: list[bytes]) -> tuple[Vocabulary, _Tables | None]:
        self._control.settimeout(MAX_LOAD_SECONDS)
        send(self._control, msgspec.json.encode(load))
        for blob in blobs:
            send(self._control, blob)
        vocabulary = msgspec.json.decode(_received(self._control), type=Vocabulary)
        if vocabulary.error is not None:
            raise TextInvalid(vocabulary.error)
        if not vocabulary.has_pieces:
            return vocabulary, None
        first, first_ends, other, other_ends = (_received(self._control) for _ in range(4))
        tables = _Tables(
            bytes(first), array("I", bytes(first_ends)), bytes(other), array("I", bytes(other_ends))
        )
        return vocabulary, tables

    def _connected(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        ours.settimeout(MAX_CALL_SECONDS)
        return ours


def _received(connection: socket.socket) -> bytearray:
    data = receive(connection)
    if data is None:
        raise EOFError("it ended")
    return data


def _end(running: list[_Running]) -> None:
    while running:
        running.pop().end()


class RemoteTokenizer(PieceTokenizer):
    """Encodes in a text process; decodes here, by the tables of the vocabulary."""

    def __init__(self, process: TextProcess) -> None:
        vocabulary, tables = process.vocabulary, process.tables
        assert tables is not None, "a vocabulary without pieces is not used in a process"
        super().__init__(
            vocabulary.vocab_size,
            frozenset(vocabulary.special_ids),
            (vocabulary.strip, vocabulary.strip_count),
        )
        self.special_texts: Sequence[str] = vocabulary.special_texts
        self._process = process
        self._tables = tables
        self._missing = frozenset(vocabulary.missing)
        self._max_token_bytes = vocabulary.max_token_bytes
        self._ids: dict[str, int | None] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True, mark: str = "") -> list[int]:
        check_encodable(text)
        return self._process.call(EncodeCall(text, add_special_tokens, mark)).token_ids

    def least_tokens(self, text: str) -> int:
        if not self._max_token_bytes:
            return 0
        return -(-len(text.encode(errors="replace")) // self._max_token_bytes)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry. The names that are asked for are this program's."""
        if token not in self._ids:
            found = self._process.call(TokenIdCall(token)).token_ids
            self._ids[token] = found[0] if found else None
        return self._ids[token]

    def _piece_pair(self, token_id: int) -> tuple[bytes, bytes] | None:
        first, first_ends, other, other_ends = self._tables
        if not 0 <= token_id < len(other_ends) or token_id in self._missing:
            return None
        return _piece(first, first_ends, token_id), _piece(other, other_ends, token_id)


def _piece(pieces: bytes, ends: array[int], token_id: int) -> bytes:
    return pieces[ends[token_id - 1] if token_id else 0 : ends[token_id]]


class RemoteGrammars:
    """Checks grammars in a text process."""

    def __init__(self, process: TextProcess) -> None:
        self._process = process

    def check(self, grammar: Grammar, param: str) -> None:
        error = self._process.call(CheckCall(grammar.kind, grammar.text)).error
        if error is not None:
            raise InvalidParameter(param, error)
