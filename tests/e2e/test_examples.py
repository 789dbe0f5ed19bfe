"""The programs of examples/, each run as a process against a service with the demo model; and the
examples of the OpenAPI document, each sent to it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.api_document import operations
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


def documented() -> Iterator[Any]:
    """The examples of request bodies: path, media type and value."""
    for route, operation in operations():
        for media, content in operation.get("requestBody", {}).get("content", {}).items():
            for example in content["examples"].values():
                words = (route.split()[1], media, example["value"])
                yield pytest.param(*words, id=f"{route} {example['summary']}")


@pytest.mark.parametrize(("path", "media", "value"), list(documented()))
def test_an_example_of_the_document_is_served(
    url: str, path: str, media: str, value: dict[str, Any]
) -> None:
    def upload(content: str) -> httpx.Response:
        row = content.replace("penstock-demo", "demo")
        return httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": row})

    if media == "multipart/form-data":
        answer = upload(value["file"])
        assert value["purpose"] == "batch"
    else:
        body = {**value, **({"model": "demo"} if "model" in value else {})}
        if "input_file_id" in body:
            row = {"custom_id": "1", "method": "POST", "url": body["endpoint"], "body": {}}
            body["input_file_id"] = upload(json.dumps(row)).json()["id"]
        answer = httpx.post(f"{url}{path}", json=body, timeout=100)
    if path == "/v1/embeddings":  # the demo makes none: tests/integration/api/dialects has a model
        assert answer.json()["error"]["code"] == "embeddings_not_supported"
        return
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text


def test_every_body_of_the_document_has_an_example() -> None:
    with_body = {route.split()[1] for route, one in operations() if "requestBody" in one}
    assert with_body == {parameters.values[0] for parameters in documented()}
