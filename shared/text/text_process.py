"""`python -m shared.text.text_process`: a frontend's helper with a model's tokenizer and grammars.

The libraries hold the interpreter's lock while they parse a vocabulary: seconds for the largest,
in which a frontend could send nothing. The first message on the socket that is the standard input
is a LoadRequest; each later one hands over a connection, on which calls are answered in turn. The
process ends when the other side closes the socket.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import msgspec

from shared.cpu_time import work_cpu_s
from shared.messages import Grammar, InvalidParameter
from shared.text.base import TextInvalid
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.model_card import ModelCard
from shared.text.rendering import receive, send
from shared.text.text_model import load_card_tokenizer
from shared.text.text_requests import (
    CheckCall,
    EncodeCall,
    LoadRequest,
    TextCall,
    TextReply,
    Vocabulary,
)
from shared.text.tokenizer import FastTokenizer

LOADING_NICENESS = 10  # streams that are served meanwhile go first
LARGE_BYTES = 64 * 1024  # while a larger call runs, the memory is not measured
TRIM_GROWTH, TRIM_BYTES = 1.25, 16 * 2**20  # of the memory since it was trimmed last
TRIM_SECONDS = 1.0  # from one trim to the next


class _Memory:
    """The resident memory of this process. Safe on several threads.

    The C library keeps memory that its threads have freed, more than a gigabyte after some large
    texts: it is returned to the system when it has grown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_large = 0  # calls that run
        self.rss_bytes = 0  # as measured last, while no large call ran; 0: not known
        self._trimmed_bytes = 0
        self._num_due = 0  # trims after large calls
        self._next_trim_s = 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc's

    @contextmanager
    def counted(self, num_bytes: int) -> Iterator[None]:
        """Counts a call of `num_bytes` as running in the block."""
        is_large = num_bytes > LARGE_BYTES
        with self._lock:
            self._num_large += is_large
        try:
            yield
        finally:
            with self._lock:
                self._num_large -= is_large
                if is_large:
                    self._num_due = 2  # its own text may not be freed yet at the first

    def measure(self) -> None:
        """Measures it, unless a large call runs, and trims it after large calls and where it has
        grown, at most once a second."""
        with self._lock:
            rss_bytes, is_quiet = _rss_bytes(), not self._num_large
            if is_quiet:
                self.rss_bytes = rss_bytes
            has_grown = rss_bytes > self._trimmed_bytes * TRIM_GROWTH + TRIM_BYTES
            is_due = has_grown or (is_quiet and self._num_due > 0)
            if not is_due or time.monotonic() < self._next_trim_s:
                return
            self._next_trim_s = time.monotonic() + TRIM_SECONDS
        self._trim(0)  # takes tens of milliseconds: no other call waits for it
        with self._lock:
            if is_quiet and not self._num_large:
                self._num_due -= self._num_due > 0
                self.rss_bytes = self._trimmed_bytes = _rss_bytes()


def _rss_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:  # not Linux
        pages = 0
    return pages * resource.getpagesize()


class _Text:
    def __init__(self, card: ModelCard, blobs: dict[str, bytes]) -> None:
        self.tokenizer: FastTokenizer = load_card_tokenizer(card, blobs)
        self._grammars = GrammarCompiler(
            self.tokenizer, card.vocab_size, card.eos_token_ids, LOADING_NICENESS
        )

    def reply(self, call: TextCall) -> TextReply:
        if isinstance(call, CheckCall):
            try:
                self._grammars.check(Grammar(call.kind, call.text), "grammar")
            except InvalidParameter as error:
                return TextReply(error=error.message)
            return TextReply()
        if isinstance(call, EncodeCall):
            token_ids = self.tokenizer.encode(
                call.text,
                add_special_tokens=call.add_special_tokens,
                mark=call.mark,
                tenant=call.tenant,
            )
            return TextReply(token_ids)
        token_id = self.tokenizer.token_id(call.token)
        return TextReply([] if token_id is None else [token_id])


def _load(control: socket.socket, memory: _Memory) -> _Text | None:
    """Returns the text side; None if it cannot be used, or the other side has gone."""
    data = receive(control)
    if data is None:
        return None
    request = msgspec.json.decode(data, type=LoadRequest)
    blobs = {digest: bytes(receive(control) or b"") for digest in request.digests}
    try:
        text = _Text(ModelCard.from_json(request.card.encode()), blobs)
    except TextInvalid as error:
        send(control, msgspec.json.encode(Vocabulary(error=str(error))))
        return None
    tokenizer = text.tokenizer
    table = tokenizer.pieces()
    if table is None:
        send(control, msgspec.json.encode(Vocabulary(has_pieces=False)))
        return None
    del blobs, data, request  # of hundreds of megabytes with what parsing them took
    memory.measure()
    vocabulary = Vocabulary(
        vocab_size=tokenizer.vocab_size,
        special_ids=sorted(tokenizer.special_ids),
        special_texts=list(tokenizer.special_texts),
        missing=[token_id for token_id, pair in enumerate(table) if pair is None],
        strip=tokenizer.strip[0],
        strip_count=tokenizer.strip[1],
        max_token_bytes=tokenizer.max_token_bytes,
        rss_bytes=memory.rss_bytes,
    )
    send(control, msgspec.json.encode(vocabulary))
    for place in (0, 1):
        pieces = [b"" if pair is None else pair[place] for pair in table]
        ends, end = array("I"), 0
        for piece in pieces:
            end += len(piece)
            ends.append(end)
        send(control, b"".join(pieces))
        send(control, ends.tobytes())
    return text


def _loaded(control: socket.socket, memory: _Memory) -> _Text | None:
    """Loads on a thread that yields to others of the machine."""
    loaded: Future[_Text | None] = Future()

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICENESS)
            loaded.set_result(_load(control, memory))
        except BaseException as error:
            loaded.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return loaded.result()


def _serve(text: _Text, memory: _Memory, connection: socket.socket) -> None:
    decoder = msgspec.json.Decoder(TextCall)
    try:
        while (data := receive(connection)) is not None:
            begun_s = work_cpu_s()
            with memory.counted(len(data)):
                reply = text.reply(decoder.decode(data))
                reply.cpu_s = work_cpu_s() - begun_s
                reply.rss_bytes = memory.rss_bytes
                send(connection, msgspec.json.encode(reply))
                del data, reply
            memory.measure()
    except OSError:  # the other side has gone
        pass
    finally:
        connection.close()


def main() -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would have prompts in it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group
    control = socket.socket(fileno=sys.stdin.fileno())
    memory = _Memory()
    text = _loaded(control, memory)
    while text is not None:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        for fd in fds:
            connection = socket.socket(fileno=fd)
            serving = (text, memory, connection)
            threading.Thread(target=_serve, args=serving, daemon=True).start()
    os._exit(0)  # threads may be in native code


if __name__ == "__main__":
    sys.exit(main())
