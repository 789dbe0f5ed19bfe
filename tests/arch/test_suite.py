"""What `make test` prints last: all counts, the failed tests by name, and what was left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process import dying_with_this_process
from tests.support.launched import is_alive
from tests.support.polling import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)

GOOD = "def test_good(tmp_path):\n    (tmp_path / 'x').write_text('x')\n"
BAD = """
import pathlib, pytest

@pytest.mark.parametrize("name", ["a::b", "c"])
def test_bad(name):
    assert name == "c" or pathlib.Path("mended").exists()

@pytest.fixture
def torn():
    yield
    raise RuntimeError("torn down badly")

def test_fails_twice(torn):
    assert pathlib.Path("mended").exists()

@pytest.mark.skip
def test_skipped(): ...
"""
IN_CLASSES = """
import pathlib, pytest

class TestOuter:
    class TestInner:
        @pytest.mark.parametrize("name", ["a.b::c"])
        def test_bad(self, name):
            assert pathlib.Path("mended").exists()
"""
GIVEN = """
from hypothesis import given, strategies

@given(strategies.none())
def test_given(_): ...
"""
MARKS = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "chaos":
            item.add_marker(pytest.mark.chaos)
"""
LEAVES = "import tempfile\n\ndef test_leaves():\n    tempfile.mkdtemp(prefix='forgotten-')\n"
BROKEN = "import no_such_module\n"


FIRST = """
import os, pathlib, time

def test_first():
    begin_s = time.monotonic()
    while not pathlib.Path("ran-beside").exists():
        assert time.monotonic() - begin_s < 100
        time.sleep(0.05)
    assert os.getpriority(os.PRIO_PROCESS, 0) == int(os.environ["PRIORITY"])  # as it was
"""
BESIDE = """
import os, pathlib, time

def test_beside():
    pathlib.Path("ran-beside").touch()
    assert os.getpriority(os.PRIO_PROCESS, 0) == 10
    begin_s = time.monotonic()
    while not pathlib.Path("ran-second").exists():
        assert time.monotonic() - begin_s < 100
        time.sleep(0.05)
    assert not pathlib.Path("ran-last").exists()
    pathlib.Path("ended-beside").touch()
    raise ValueError("what it printed comes whole")
"""
HANGS = """
import os, subprocess, sys, time
from shared.process import dying_with_this_process

def test_hangs():
    server = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"],
        preexec_fn=dying_with_this_process(),
        start_new_session=True,
    )
    with open("NAME.new", "w") as file:
        print(os.getpid(), os.getppid(), server.pid, file=file)
    os.rename("NAME.new", "NAME.pids")
    time.sleep(100)
"""
SECOND = "import pathlib\n\ndef test_second():\n    pathlib.Path('ran-second').touch()\n"
LAST = """
import pathlib

def test_last():
    pathlib.Path("ran-last").touch()
    assert pathlib.Path("ended-beside").exists()
"""


def environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a second each, and there are many runs
        "TMPDIR": str(temporary),
        "PRIORITY": str(os.getpriority(os.PRIO_PROCESS, 0)),
    }


def suite(directory: Path, *arguments: str) -> tuple[int, list[str]]:
    """Returns the exit status and the lines of output of the suite in a directory of tests."""
    temporary = directory / "tmp"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.suite", *arguments],
        cwd=directory,
        env=environment(temporary),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert list(temporary.iterdir()) == [], "the suite's own folder stayed"
    assert "Traceback" not in ended.stderr
    return ended.returncode, ended.stdout.splitlines()


def test_the_last_lines_name_the_failures_of_every_run(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text(GOOD)
    (tmp_path / "test_bad.py").write_text(BAD)
    runs = ("-m 'not browser' test_good.py", "-q test_bad.py", "-q test_good.py")
    status, lines = suite(tmp_path, "run", *runs)
    assert status == 1
    counts, *failed = lines[-3:]
    assert counts.startswith("6 tests in 3 runs, ")
    assert counts.endswith(": 3 passed, 2 failed, 1 skipped")
    assert (tmp_path / ".pytest_cache/last-run").read_text() == f"{counts}\n"
    assert failed == [
        "failed: test_bad.py::test_bad[a::b]",
        "failed: test_bad.py::test_fails_twice",
    ]


def test_what_fails_is_run_again_and_named(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD.replace("torn)", ")"))
    assert suite(tmp_path, "run", "test_bad.py")[0] == 1
    status, lines = suite(tmp_path, "failed")
    assert status == 1
    twice = ["test_bad.py::test_bad[a::b]", "test_bad.py::test_fails_twice"]
    assert lines[-2:] == [f"run twice: {name} (failed, then failed)" for name in twice]
    (tmp_path / "mended").touch()
    status, lines = suite(tmp_path, "failed")
    assert status == 0
    assert lines[-2:] == [f"run twice: {name} (failed, then passed)" for name in twice]
    (tmp_path / "test_good.py").write_text(GOOD)
    assert suite(tmp_path, "run", "test_good.py")[0] == 0
    status, lines = suite(tmp_path, "failed")
    assert (status, len(lines)) == (5, 1)
    assert "nothing to run again" in lines[0]


def test_a_failed_test_of_a_class_is_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_nested.py").write_text(IN_CLASSES)
    name = "test_nested.py::TestOuter::TestInner::test_bad[a.b::c]"
    status, lines = suite(tmp_path, "run", "test_nested.py")
    assert (status, lines[-1]) == (1, f"failed: {name}")
    (tmp_path / "mended").touch()
    status, lines = suite(tmp_path, "failed")
    assert (status, lines[-1]) == (0, f"run twice: {name} (failed, then passed)")


def test_a_failed_test_that_is_not_found_again_has_not_passed(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD)
    assert suite(tmp_path, "run", "-k fails_twice test_bad.py")[0] == 1
    (tmp_path / "test_bad.py").write_text(GOOD)
    status, lines = suite(tmp_path, "failed")
    assert status != 0
    assert lines[-1] == "not run again: test_bad.py::test_fails_twice (failed)"


def test_an_unrecorded_run_leaves_the_record_of_another(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(BAD)
    (tmp_path / "test_good.py").write_text(GOOD)
    assert suite(tmp_path, "run", "test_bad.py")[0] == 1
    names = ("failed-tests", "last-trouble", "last-run")
    records = [tmp_path / ".pytest_cache" / name for name in names]
    before = [record.read_text() for record in records]
    assert suite(tmp_path, "run", "--unrecorded", "test_good.py")[0] == 0
    assert [record.read_text() for record in records] == before


@pytest.mark.parametrize(
    ("marks", "status", "found"),
    [
        ("long or hypothesis", 0, ["test_given.py::test_given"]),
        ("chaos", 0, ["chaos/test_good.py::test_good"]),
        ("long", 5, []),  # and no file is imported: BROKEN would fail
    ],
)
def test_a_file_whose_marks_are_set_by_hooks_is_not_left_out(
    tmp_path: Path, marks: str, status: int, found: list[str]
) -> None:
    (tmp_path / "chaos").mkdir()
    (tmp_path / "chaos" / "test_good.py").write_text(GOOD)
    (tmp_path / "conftest.py").write_text(MARKS)
    (tmp_path / "test_given.py").write_text(GIVEN)
    if not found:
        (tmp_path / "test_broken.py").write_text(BROKEN)
    plugins = ("-p", "tests.conftest", "-p", "_hypothesis_pytestplugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *plugins, "-m", marks],
        cwd=tmp_path,
        env=environment(tmp_path / "tmp"),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert [line for line in ended.stdout.splitlines() if "::" in line] == found


def test_what_a_test_leaves_behind_is_named_and_fails(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    status, lines = suite(tmp_path, "run", "test_leaves.py")
    assert status == 1
    assert lines[-2].startswith("left in the temporary folder: forgotten-")
    assert lines[-1].endswith("1 passed, 0 failed")
    status, again = suite(tmp_path, "failed")  # running none again must not pass
    assert status == 1
    assert "failed by more than tests" in again[0]
    assert again[1:] == lines[-2:]


def test_more_than_a_failed_test_is_not_passed_by_running_again(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    (tmp_path / "test_good.py").write_text(GOOD)
    status, lines = suite(tmp_path, "run", "test_broken.py", "test_good.py")
    assert status == 2
    assert "1 passed, 1 failed" in lines[-2]
    assert "test_broken" in lines[-1]
    status, again = suite(tmp_path, "failed")
    assert status == 1
    assert again[1:] == lines[-2:]
    status, lines = suite(tmp_path, "run", "test_nowhere.py", "test_good.py")
    assert status == 4
    assert lines[-1] == "pytest ended with status 4: see above"


def test_a_run_beside_all_but_the_last_has_a_low_priority_and_its_failures_are_named(
    tmp_path: Path,
) -> None:
    texts = {"first": FIRST, "beside": BESIDE, "second": SECOND, "last": LAST}
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    runs = [f"test_{name}.py" for name in ("beside", "first", "second", "last")]
    status, lines = suite(tmp_path, "run", "--beside", *runs)
    assert status == 1
    assert any("what it printed comes whole" in line for line in lines)
    assert lines[-2].startswith("4 tests in 4 runs, ")
    assert lines[-1] == "failed: test_beside.py::test_beside"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=("ctrl-c", "killed"))
def test_the_end_of_the_suite_ends_both_runs_and_what_their_tests_started(
    tmp_path: Path, signum: signal.Signals
) -> None:
    files = []
    for name in ("first", "beside"):
        (tmp_path / f"test_{name}.py").write_text(HANGS.replace("NAME", name))
        files.append(tmp_path / f"{name}.pids")
    command = [sys.executable, "-m", "tests.suite", "run"]
    dies = dying_with_this_process()

    def in_a_terminal() -> None:
        """Undoes what the background of a script ignores."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if dies is not None:
            dies()

    process = subprocess.Popen(
        [*command, "--beside", "test_beside.py", "-p xdist -n 1 test_first.py"],
        cwd=tmp_path,
        env=environment(tmp_path / "tmp"),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=in_a_terminal,
    )
    wait_until(lambda: all(map(Path.exists, files)), "the tests' start", 60)
    trouble = tmp_path / ".pytest_cache/last-trouble"
    assert trouble.read_text() == "the run did not end\n"
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    # A terminal signals all processes in its foreground.
    (os.killpg if signum is signal.SIGINT else os.kill)(process.pid, signum)
    output, _ = process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_alive, pids)), f"the end of {pids}", 20)
    assert (trouble.read_text() == "the run did not end\n") is (signum is signal.SIGKILL)
    if signum is not signal.SIGKILL:
        assert " in 2 runs, " in output
        assert list((tmp_path / "tmp").iterdir()) == []


def test_markers_by_which_files_are_left_out_are_in_these_files_alone() -> None:
    """pytest_ignore_collect reads them in the text of a file of tests."""
    lists = re.findall(r"^(?:LEFT_OUT|MISSING) := .*", (REPOSITORY / "Makefile").read_text(), re.M)
    markers = {*re.findall(r"[a-z]+(?=[ )]|$)", " ".join(lists)), "alone", "vllm"}
    assert {"packages", "browser", "arm"} < markers
    elsewhere = [
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "tests").rglob("*.py")
        if not path.name.startswith("test_")
        and re.search(rf"(mark\.|add_marker\(.)({'|'.join(markers)})\b", path.read_text())
    ]
    assert not elsewhere
