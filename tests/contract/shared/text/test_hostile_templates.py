"""A hostile chat template costs its own rendering: bounded memory and time, in a process apart."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.cpu_time import work_cpu_s
from shared.messages import InvalidParameter
from shared.text import chat_template as rendering
from shared.text.base import RenderingUnavailable, TextInvalid
from shared.text.chat_template import JinjaChatTemplate, RenderingProcesses
from shared.text.rendering_process import KILL_CPU_SECONDS, MAX_MEMORY_BYTES

ORDINARY = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
GO = [{"role": "user", "content": "go"}]
BIG = "messages[0].content * 3000000"

LARGE = {
    "ljust": "{{ messages[0].content.ljust(1500000000) }}",
    "rjust": "{{ messages[0].content.rjust(1500000000) }}",
    "zfill": "{{ messages[0].content.zfill(1500000000) }}",
    "percent": "{{ '%1500000000d' % messages|length }}",
    "format filter": "{{ '%1500000000d'|format(messages|length) }}",
    "format": "{{ '{:1500000000d}'.format(messages|length) }}",
    "center": "{{ messages[0].content|center(1500000000) }}",
    "replace": "{{ (" + BIG + ")|replace('g', 'b' * 7000000) }}",
    "replace method": "{{ (" + BIG + ").replace('g', 'b' * 7000000) }}",
    "join": "{{ (" + BIG + ")|join('b' * 7000000) }}",
    "indent": "{{ messages[0].content|indent(1500000000, first=true) }}",
    "tojson": "{{ messages|tojson(indent=500000000) }}",
    "expandtabs": "{{ (messages[0].content ~ '\t').expandtabs(1500000000) }}",
}
SLOW = {
    "indent": "{% for i in range(99) %}{{ (('a\n' * 3000000)|indent(10))|length }}{% endfor %}",
    "sort": "{{ ((" + BIG + ")|list|sort(reverse=true)|sort)|length }}"
    "{% for i in range(99) %}{{ ((" + BIG + ")|list|sort(case_sensitive=false))|length }}"
    "{% endfor %}",
}


def guarded(attack: str) -> str:
    """Behind a condition that no probe fulfils, so that loading is not what it hits."""
    return "{% if messages[0].content == 'go' %}" + attack + "{% else %}ok{% endif %}"


@pytest.fixture
def processes() -> Iterator[RenderingProcesses]:
    made = RenderingProcesses()
    yield made
    made.close()


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


class Peaks(threading.Thread):
    """Watches the processes' largest resident memory."""

    def __init__(self, processes: RenderingProcesses) -> None:
        super().__init__(daemon=True)
        self.most_mib = 0
        self._processes = processes
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self.look()

    def look(self) -> None:
        for pid in self._processes.pids:
            try:
                self.most_mib = max(self.most_mib, peak_mib(pid))
            except (OSError, StopIteration):  # it has just ended
                continue

    def stop(self) -> None:
        self._done.set()
        self.join()


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_makes_gigabytes_is_refused_and_bounded(
    name: str, processes: RenderingProcesses
) -> None:
    template = JinjaChatTemplate(guarded(LARGE[name]), {}, processes=processes)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = Peaks(processes)
    peaks.start()
    with pytest.raises(InvalidParameter, match=r"chat template|too long") as refused:
        template.render(GO)
    peaks.stop()
    assert refused.value.param == "messages"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024
    assert template.render(HI) == "ok"
    peaks.look()  # a process that outlived the attack knows its own peak
    assert 0 < peaks.most_mib < MAX_MEMORY_BYTES / 2**20 + 64


@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_takes_long_outside_of_loops_is_killed(
    name: str, processes: RenderingProcesses
) -> None:
    template = JinjaChatTemplate(guarded(SLOW[name]), {}, processes=processes)
    before, before_s = os.times(), work_cpu_s()
    with pytest.raises(InvalidParameter, match=r"too long|too much|more memory") as refused:
        template.render(GO)
    assert refused.value.param == "messages"
    assert template.render(HI) == "ok"
    processes.close()  # reaped: their time counts as the children's now
    after = os.times()
    used_s = after.children_user + after.children_system
    used_s -= before.children_user + before.children_system
    assert used_s < 2 * KILL_CPU_SECONDS  # of processor time, starting two processes included
    assert work_cpu_s() - before_s > used_s / 4, "its caller is charged"


def test_a_template_that_is_hostile_when_it_is_compiled_is_refused(
    processes: RenderingProcesses,
) -> None:
    for attack in ("{{ 'a'.ljust(1500000000) }}", "{{ 'a'|center(1500000000)|length }}"):
        try:
            template = JinjaChatTemplate(attack, {}, processes=processes)
        except TextInvalid:
            continue
        with pytest.raises(InvalidParameter):
            template.render(HI)


def test_other_renderings_go_on_beside_a_hostile_one(processes: RenderingProcesses) -> None:
    hostile = JinjaChatTemplate(guarded(SLOW["indent"]), {}, processes=processes)
    ordinary = JinjaChatTemplate(ORDINARY, {}, processes=processes)
    is_over = threading.Event()

    def attack() -> None:
        with pytest.raises(InvalidParameter):
            hostile.render(GO)
        is_over.set()

    thread = threading.Thread(target=attack)
    thread.start()
    num_rendered = 0
    while not is_over.is_set():
        assert ordinary.render(HI) == "[hi]"
        num_rendered += 1
        time.sleep(0.02)
    thread.join()
    assert num_rendered > 20


def test_a_process_that_was_killed_from_outside_is_replaced(processes: RenderingProcesses) -> None:
    template = JinjaChatTemplate(ORDINARY, {}, processes=processes)
    (before,) = processes.pids
    os.kill(before, signal.SIGKILL)
    assert template.render(HI) == "[hi]"
    assert before not in processes.pids


def test_what_ends_processes_from_outside_is_no_fault_of_the_template(
    processes: RenderingProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = rendering._Process.render
    with monkeypatch.context() as patched:

        def killed(process: rendering._Process, *request: Any) -> Any:
            os.kill(process.pid, signal.SIGKILL)
            return render(process, *request)

        patched.setattr(rendering._Process, "render", killed)
        with pytest.raises(RenderingUnavailable, match="killed"):
            JinjaChatTemplate(ORDINARY, {}, processes=processes)
    with monkeypatch.context() as patched:

        def stopped(process: rendering._Process, *request: Any) -> Any:
            os.kill(process.pid, signal.SIGSTOP)
            return render(process, *request)

        patched.setattr(rendering, "MAX_WALL_SECONDS", 0.2)
        patched.setattr(rendering._Process, "render", stopped)
        with pytest.raises(RenderingUnavailable, match="timed out"):
            JinjaChatTemplate(ORDINARY, {}, processes=processes)
    assert JinjaChatTemplate(ORDINARY, {}, processes=processes).render(HI) == "[hi]"


def test_a_process_that_cannot_be_started_is_no_fault_of_the_template(
    processes: RenderingProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(rendering.socket, "socketpair", none_left)
        with pytest.raises(RenderingUnavailable, match="Too many open files"):
            JinjaChatTemplate(ORDINARY, {}, processes=processes)
    assert JinjaChatTemplate(ORDINARY, {}, processes=processes).render(HI) == "[hi]"


def test_a_process_is_kept_for_the_next_rendering(processes: RenderingProcesses) -> None:
    template = JinjaChatTemplate(ORDINARY, {}, processes=processes)
    before = processes.pids
    for _ in range(20):
        template.render(HI)
    assert processes.pids == before


def test_processes_end_with_their_parent(processes: RenderingProcesses) -> None:
    JinjaChatTemplate(ORDINARY, {}, processes=processes)
    (pid,) = processes.pids
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_rendering_process_has_no_secrets_in_its_environment(
    processes: RenderingProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:secret@host")
    JinjaChatTemplate(ORDINARY, {}, processes=processes)
    (pid,) = processes.pids
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_closing_ends_a_rendering_that_is_under_way(processes: RenderingProcesses) -> None:
    template = JinjaChatTemplate(guarded(SLOW["indent"]), {}, processes=processes)
    ended = threading.Event()

    def render() -> None:
        with pytest.raises(RenderingUnavailable, match="closed"):
            template.render(GO)
        ended.set()

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.3)
    processes.close()
    assert ended.wait(KILL_CPU_SECONDS / 2)
    thread.join()
