"""The programs of examples/, each run as a process against a service with the demo model."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import Launched, free_port
from tests.support.tool_models import make_demo_with_tools

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
PROMPTS = ["What is a job?", "What is a queue?", "What does a worker do?"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("examples")
    env = {
        "MODEL": str(make_demo_with_tools(directory / "demo")),
        "DTYPE": "float32",
        "KV_CACHE_MEMORY_GB": "0.2",
    }
    with Launched(directory, env) as penstock:
        yield penstock.base_url


def run(name: str, *words: str, url: str, given: str = "") -> str:
    """What an example prints."""
    ended = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *words],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")},
            "PENSTOCK_URL": url,
            "PYTHONPATH": str(REPOSITORY),
            "LANGSMITH_TRACING": "false",
        },
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stdout


def test_openai_chat(url: str) -> None:
    text, counted = run("openai_chat", "What is Penstock?", url=url).rstrip().rsplit("\n", 1)
    assert len(text) > 20
    assert re.fullmatch(r"demo: \d+ tokens", counted)


def test_resume(url: str) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    text, counted = run("resume", "What is Penstock?", url=f"{away},{url}").rsplit("\n", 2)[:2]
    assert len(text) > 20
    assert re.fullmatch(r"chatcmpl-\S+: \d+ tokens", counted)


def test_background_job(url: str) -> None:
    name = run("background_job", "submit", "What is Penstock?", url=url).strip()
    assert name.startswith("resp_")
    first, again = (run("background_job", "follow", name, url=url) for _ in range(2))
    assert first == again
    assert len(first) > 20
    assert run("background_job", "cancel", name, url=url) == "finished\n"


def test_batch_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    rows = [json.loads(line) for line in run("batch_file", str(file), url=url).splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert all(row["text"] and row["error"] is None for row in rows)


def test_tools(url: str) -> None:
    called, answer = run("tools", url=url).split("\n", 1)
    assert re.fullmatch(r"level\('(mill|bridge|dam)'\) = (1\.2|2\.7|14\.0)", called)
    assert answer.strip()


def test_structured_output(url: str) -> None:
    dam = json.loads(run("structured_output", url=url))
    assert dam.keys() == {"kind", "year", "height_m"}
    assert 1000 <= dam["year"] <= 2100


def test_langchain_chat(url: str) -> None:
    assert len(run("langchain_chat", "a queue", url=url)) > 20


def test_many_prompts(url: str) -> None:
    prompts = [f"{PROMPTS[number % 3]} {number}" for number in range(80)]  # more than are under way
    rows = run("many_prompts", url=url, given="\n".join(prompts)).splitlines()
    answers = {row["number"]: row for row in map(json.loads, rows)}
    assert [answers[number]["prompt"] for number in range(80)] == prompts
    assert all(row["text"] and row["tokens"] for row in answers.values())


def test_each_example_says_what_it_shows_and_is_run_here() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) >= 5
    for file in files:
        shown = ast.get_docstring(ast.parse(file.read_text())) or ""
        assert f"python examples/{file.name}" in shown, file.name
        assert "PENSTOCK_URL" in shown, file.name
        assert f"test_{file.stem}" in globals(), file.name
    for file in EXAMPLES.glob("*.ts"):  # tests/clients/test_typescript.py runs them
        assert f"node examples/{file.name}" in file.read_text(), file.name
