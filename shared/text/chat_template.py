"""JinjaChatTemplate: messages to prompt text, as transformers' apply_chat_template does it.

A template is a program of the checkpoint's author, and it runs over what clients send. The sandbox
keeps it from Python; a process that can be killed bounds its memory and its time.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from shared.cpu_time import add_cpu_s
from shared.messages import InvalidParameter
from shared.text.base import RenderingUnavailable, TextInvalid
from shared.text.rendering import (
    END_OF_TIME,
    MAX_CHARS,
    RenderReply,
    RenderRequest,
    TemplateSource,
    receive,
    send,
)

_numbers = itertools.count()


class JinjaChatTemplate:
    """A checkpoint's chat template, rendered in a separate process. Safe on several threads.

    `source` is a template, or several by name, of which "tool_use" serves requests with tools and
    "default" the others. `special_tokens` are variables of the template ("bos_token", ...).
    Raises TextInvalid for a source that does not compile, and RenderingUnavailable.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_CHARS,
        processes: RenderingProcesses | None = None,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.source = sources.get("default", "")
        self._template = TemplateSource(next(_numbers), sources, dict(special_tokens), max_chars)
        self._processes = processes or shared_processes()
        self._now = now
        try:
            compiled = checked(
                self._processes.render(RenderRequest(self._template.number), self._template)
            )
        except InvalidParameter as error:
            raise TextInvalid(f"the chat template does not compile: {error.message}") from error
        self.variables = frozenset(compiled.variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> str:
        """Returns the prompt's text, with the special tokens in it: encode it without adding any.

        `extra` are further variables, such as `documents` or `enable_thinking`. `name`: one of the
        source's templates instead of the one for the request's tools. Raises InvalidParameter for
        "chat_template" if no template has that name, for "messages" when the template refuses
        the conversation or needs too much time or memory, and for "chat_template_kwargs" when a
        variable's name is not the client's to set. Raises RenderingUnavailable as
        RenderingProcesses.render.
        """
        request = RenderRequest(
            number=self._template.number,
            messages=list(messages),
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            extra=dict(extra or {}),
            name=name,
            now=self._now().isoformat(),
        )
        return checked(self._processes.render(request, self._template)).text


# The bound on processor time is the process's own. This one is for a machine that is suspended.
MAX_WALL_SECONDS = 20.0
MAX_TEMPLATES = 64  # of one process, which is replaced then
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")  # no secrets in it

_KILLED = frozenset({-signal.SIGKILL, -signal.SIGTERM})  # from outside, as by lack of memory

TOO_LONG = "refused by the chat template: it takes too long over this conversation"
TOO_LARGE = "refused by the chat template: it needs more memory than a rendering may have"
CLOSED = "the rendering processes are closed"


class RenderingProcesses:
    """As many processes as threads render at once, started when they are needed and kept.

    Safe on several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False
        weakref.finalize(self, _end, self._all)  # where `close` is not called, at exit

    def render(self, request: RenderRequest, template: TemplateSource) -> RenderReply:
        """Has a process render the request. Raises InvalidParameter for "messages" where the
        process ended over it, and RenderingUnavailable if none could be started, it was killed
        from outside or timed out.

        One that ends for another reason than its bounds, such as the kernel's lack of memory, may
        have been ended before the request came: the request is tried once more.
        """
        data = _encoded(request)
        for is_last in (False, True):
            try:
                process = self._take()
            except OSError as error:
                raise RenderingUnavailable(
                    f"no rendering process can be started: {error}"
                ) from None
            try:
                reply = process.render(data, request, template)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                code = self._drop(process)
                if self._is_closed:
                    raise RenderingUnavailable(CLOSED) from None
                if code == -END_OF_TIME:
                    raise InvalidParameter("messages", TOO_LONG) from None
                if isinstance(error, TimeoutError):
                    raise RenderingUnavailable("a rendering process timed out") from None
                if is_last and code in _KILLED:
                    raise RenderingUnavailable("rendering processes were killed") from None
                if is_last:
                    raise InvalidParameter("messages", f"{TOO_LARGE} (process: {code})") from None
                continue
            except BaseException:
                self._drop(process)
                raise
            if reply.out_of_memory:
                self._drop(process)
                raise InvalidParameter("messages", TOO_LARGE)
            self._give_back(process)
            return reply
        raise AssertionError("unreachable")

    @property
    def pids(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(process.pid for process in self._all)

    def close(self) -> None:
        """Kills all processes, also those that render."""
        with self._lock:
            self._is_closed = True
            processes = tuple(self._all)
            self._all.clear()
            self._idle.clear()
        for process in processes:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            if self._is_closed:
                raise RenderingUnavailable(CLOSED)
            if self._idle:
                return self._idle.pop()
        process = _Process()  # takes some ten milliseconds: not under the lock
        with self._lock:
            self._all.add(process)
        return process

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed and process.num_templates < MAX_TEMPLATES:
                self._idle.append(process)
                return
        self._drop(process)

    def _drop(self, process: _Process) -> int | None:
        with self._lock:
            self._all.discard(process)
        return process.end()


@functools.cache
def shared_processes() -> RenderingProcesses:
    """Returns the rendering processes that the templates of this process share."""
    return RenderingProcesses()


def _end(processes: set[_Process]) -> None:
    for process in tuple(processes):
        process.end()


class _Process:
    """One rendering process. Used by one thread at a time."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._connection, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "shared.text.rendering_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a traceback may have a prompt in it
                    env={**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    start_new_session=True,  # a signal to the frontend's group leaves it alone
                )
        except OSError:
            self._connection.close()
            raise
        self._known: set[int] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_templates(self) -> int:
        return len(self._known)

    def render(self, data: bytes, request: RenderRequest, template: TemplateSource) -> RenderReply:
        """Raises OSError or EOFError when the process ends, TimeoutError when it takes too long."""
        deadline_s = time.monotonic() + MAX_WALL_SECONDS
        if request.number not in self._known:
            first = RenderRequest(number=template.number, template=template)
            reply = self._exchange(msgspec.json.encode(first), deadline_s)
            if reply.error is not None or reply.out_of_memory or request.messages is None:
                return reply
            self._known.add(request.number)
        return self._exchange(data, deadline_s)

    def _exchange(self, data: bytes, deadline_s: float) -> RenderReply:
        begun_s = time.monotonic()
        self._connection.settimeout(max(0.001, deadline_s - begun_s))
        try:
            send(self._connection, data)
            answer = receive(self._connection)
            if answer is None:
                raise EOFError
            reply = msgspec.json.decode(answer, type=RenderReply)
        except BaseException:
            add_cpu_s(time.monotonic() - begun_s)  # an upper bound: the process cannot be asked
            raise
        add_cpu_s(reply.cpu_s)
        return reply

    def end(self) -> int | None:
        """Kills it. Returns its earlier exit status, as Popen.returncode; None if it still ran."""
        self._connection.close()
        try:
            return self._process.wait(0.1)  # one that closed its connection is about to be reaped
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        return None


def _encoded(request: RenderRequest) -> bytes:
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError as error:
        raise InvalidParameter("messages", "text has a lone surrogate") from error
    except RecursionError as error:
        raise InvalidParameter("messages", "the conversation nests too deeply") from error
    except TypeError as error:
        raise InvalidParameter("messages", str(error)) from error


def checked(reply: RenderReply) -> RenderReply:
    """Raises the error that a reply has: InvalidParameter or TextInvalid."""
    if reply.error is None:
        return reply
    if reply.param is None:
        raise TextInvalid(reply.error)
    raise InvalidParameter(reply.param, reply.error, reply.code)
