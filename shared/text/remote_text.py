"""The tokenizer and the grammars of a model whose vocabulary a helper process holds."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from shared.cpu_time import add_cpu_s
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

log = logging.getLogger(__name__)

MAX_LOAD_SECONDS = 180.0
MAX_CALL_SECONDS = 60.0
# A process's memory beyond that after loading its vocabulary: the tree of its grammars is as large
# again, and the cached grammars take a dozen MiB.
MAX_GROWTH, LEAST_MAX_RSS_BYTES = 4.0, 512 * 2**20
MIN_LIFE_S = 60.0  # of a process, before it is replaced for its memory
_LOST = (OSError, EOFError, msgspec.MsgspecError)


class TextProcess:
    """The process of one model's text. Safe on several threads.

    It is started again when it has ended, and replaced when its memory has grown too much: calls
    in progress then end in the old process.
    """

    def __init__(self, card: ModelCard, blobs: Mapping[str, bytes]) -> None:
        """Raises TextInvalid as `load_text` does, and RenderingUnavailable."""
        for digest in card.digests:
            if digest not in blobs:
                raise TextInvalid(missing_file(digest))
        self._load = LoadRequest(card.to_json().decode(), list(card.digests))
        self._blobs = [blobs[digest] for digest in card.digests]
        self._model = card.name
        self._starting = threading.Lock()  # held while a process loads
        self._lock = threading.Lock()  # guards the fields below; never held for long
        self._all: list[_Running] = []  # the current one, one that loads, those that finish
        self._current: _Running | None = None
        self._is_replacing = self._is_closed = False
        weakref.finalize(self, _end_all, self._all)
        running = self._take()
        self.vocabulary, self.tables = running.answer
        self._give_back(running)

    def call(self, call: TextCall) -> TextReply:
        """Raises RenderingUnavailable if the process ends over it twice, or times out."""
        data = msgspec.json.encode(call)
        for _ in range(2):
            running = self._take()
            try:
                reply = running.exchange(data)
                self._judge(running, reply.rss_bytes)
                return reply
            except _LOST as error:
                self._end(running)
                if isinstance(error, TimeoutError):
                    break
            finally:
                self._give_back(running)
        raise RenderingUnavailable("the model's tokenizer process exited or timed out")

    @property
    def pid(self) -> int:
        running = self._take()
        self._give_back(running)
        return running.pid

    def close(self) -> None:
        """Ends the process; later calls raise RenderingUnavailable. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._current = None
            _end_all(self._all)

    def _take(self) -> _Running:
        """Returns the process with one more call counted on it; starts it if none runs."""
        running = self._taken()
        if running is None:
            with self._starting:
                running = self._taken()
                if running is None:
                    running = self._started(num_calls=1)
        return running

    def _taken(self) -> _Running | None:
        with self._lock:
            self._check_open()
            if self._current is not None:
                self._current.num_calls += 1
            return self._current

    def _check_open(self) -> None:
        if self._is_closed:
            raise RenderingUnavailable("the process of the model's tokenizer is closed")

    def _give_back(self, running: _Running) -> None:
        with self._lock:
            running.num_calls -= 1
            is_over = running is not self._current and running.num_calls == 0
        if is_over:
            self._end(running)

    def _started(self, *, num_calls: int) -> _Running:
        """Starts a process, which becomes the current one when it has loaded. Raises TextInvalid
        and RenderingUnavailable."""
        try:
            running = _Running(num_calls)
        except OSError as error:
            raise _not_loaded(error) from None
        try:
            with self._lock:
                self._check_open()
                self._all.append(running)
            running.load(self._load, self._blobs)
            with self._lock:
                self._check_open()
                old, self._current = self._current, running
                is_over = old is not None and old.num_calls == 0  # else its last call ends it
            if old is not None and is_over:
                self._end(old)
            return running
        except BaseException as error:
            self._end(running)
            if isinstance(error, _LOST):
                raise _not_loaded(error) from None
            raise

    def _judge(self, running: _Running, rss_bytes: int) -> None:
        """Has the process replaced where its memory is above its bound."""
        if rss_bytes <= running.max_rss_bytes:
            return
        with self._lock:
            is_young = time.monotonic() < running.replaceable_s
            if running is not self._current or is_young or self._is_replacing:
                return
            self._is_replacing = True
        extra = {"model": self._model, "rss_mib": rss_bytes >> 20}
        extra["max_mib"] = running.max_rss_bytes >> 20
        log.warning("the tokenizer process uses too much memory and is replaced", extra=extra)
        threading.Thread(target=self._replace, args=(running,), daemon=True).start()

    def _replace(self, old: _Running) -> None:
        try:
            self._started(num_calls=0)
        except (RenderingUnavailable, TextInvalid) as error:
            old.replaceable_s = time.monotonic() + MIN_LIFE_S
            if not self._is_closed:
                extra = {"model": self._model, "reason": str(error)}
                log.error("failed to replace the tokenizer process", extra=extra)
        finally:
            self._is_replacing = False

    def _end(self, running: _Running) -> None:
        """Ends a process. Idempotent."""
        with self._lock:
            if running is self._current:
                self._current = None
            if running in self._all:
                self._all.remove(running)
        running.end()


def _not_loaded(error: BaseException) -> RenderingUnavailable:
    return RenderingUnavailable(f"no process can load the model's tokenizer: {error}")


class _Tables(NamedTuple):
    """Bytes of all tokens, in front of a text and elsewhere, and where each ends."""

    first: bytes
    first_ends: array[int]
    other: bytes
    other_ends: array[int]


class _Running:
    """A process that loads the text, or has. `num_calls`: at work on it, counted by its owner."""

    answer: tuple[Vocabulary, _Tables | None]
    max_rss_bytes: int

    def __init__(self, num_calls: int) -> None:
        """Raises OSError."""
        self.num_calls = num_calls
        self.replaceable_s = time.monotonic() + MIN_LIFE_S
        self._lock = threading.Lock()
        self._is_ended = False
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

    def load(self, load: LoadRequest, blobs: list[bytes]) -> None:
        """Raises OSError, EOFError or MsgspecError if the process fails, and TextInvalid."""
        self.answer = self._loaded(load, blobs)
        grown = round(MAX_GROWTH * self.answer[0].rss_bytes)
        self.max_rss_bytes = max(LEAST_MAX_RSS_BYTES, grown)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, data: bytes) -> TextReply:
        """Raises OSError, EOFError and MsgspecError if the process does not answer."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connected()
        begun_s = time.monotonic()
        try:
            send(connection, data)
            reply = msgspec.json.decode(_received(connection), type=TextReply)
        except BaseException:
            add_cpu_s(time.monotonic() - begun_s)  # an upper bound: the process cannot be asked
            connection.close()
            raise
        add_cpu_s(reply.cpu_s)
        with self._lock:
            if not self._is_ended:
                self._idle.append(connection)
                return reply
        connection.close()
        return reply

    def end(self) -> None:
        """Kills it. Idempotent."""
        with self._lock:
            self._is_ended = True
            idle, self._idle = self._idle, []
        self._control.close()
        for connection in idle:
            connection.close()
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
        try:
            with theirs:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        ours.settimeout(MAX_CALL_SECONDS)
        return ours


def _received(connection: socket.socket) -> bytearray:
    data = receive(connection)
    if data is None:
        raise EOFError("it ended")
    return data


def _end_all(running: list[_Running]) -> None:
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

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        check_encodable(text)
        return self._process.call(EncodeCall(text, add_special_tokens, mark, tenant)).token_ids

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
