"""`make run` with a file of models: each has its name, and one that cannot load hurts no other."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.support.launched import Launched

pytestmark = pytest.mark.timeout(240)


def models_file(directory: Path, text: str) -> dict[str, str]:
    (directory / "models.toml").write_text(text)
    return {"MODELS_FILE": "models.toml", "RUNNER": "echo"}


@pytest.mark.promise("Models: one command serves several models by their names")
def test_two_models_are_served_by_their_names(tmp_path: Path) -> None:
    env = models_file(
        tmp_path,
        '[[models]]\nserved_model_name = "one"\n'
        '[[models]]\nserved_model_name = "two"\nworkers = 2\nmax_model_len = 64\n',
    )
    with Launched(tmp_path, env) as penstock:
        assert "Models: one, two\n" in penstock.output
        assert '"model": "one"' in penstock.curl_line()
        with OpenAI(base_url=f"{penstock.base_url}/v1", api_key="none") as client:
            assert {model.id for model in client.models.list()} == {"one", "two"}
            for name in ("one", "two"):
                answer = client.completions.create(model=name, prompt="again", max_tokens=4)
                assert answer.model == name
                assert answer.choices[0].finish_reason == "length"
        lengths = {
            model["id"]: model["max_model_len"]
            for model in httpx.get(f"{penstock.base_url}/v1/models").json()["data"]
        }
        assert lengths["two"] == 64 != lengths["one"]
        workers = httpx.get(f"{penstock.base_url}/health").json()["workers"]
        assert sorted(worker["models"] for worker in workers) == [["one"], ["two"], ["two"]]


@pytest.mark.promise(
    "Models: a model that cannot be loaded is named with its reason, and the others are served"
)
def test_a_model_that_cannot_be_loaded_is_named_and_the_other_is_served(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    env = models_file(
        tmp_path,
        '[[models]]\nserved_model_name = "good"\n'
        f'[[models]]\nserved_model_name = "absent"\nmodel = "{tmp_path}/nowhere"\n'
        f'[[models]]\nmodel = "{broken}"\n',
    )
    with Launched(tmp_path, env) as penstock:
        reason = f"PENSTOCK_MODEL='{tmp_path}/nowhere': there is no directory '{tmp_path}/nowhere'."
        assert f"penstock: worker 1 (absent): {reason}\n" in penstock.output
        assert f"Not served: absent: {reason}\n" in penstock.output
        assert (
            f"Not served: broken: PENSTOCK_MODEL='{broken}': '{broken}' has no config"
            in penstock.output
        )
        assert "Models: good\n" in penstock.output
        answer = httpx.post(
            f"{penstock.base_url}/generate",
            json={"model": "good", "prompt": "hello", "max_tokens": 5, "stream": False},
            timeout=30,
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
        asked = {"model": "absent", "prompt": "hello"}
        assert httpx.post(f"{penstock.base_url}/generate", json=asked).status_code == 404


def test_without_any_model_that_loads_the_launcher_ends(tmp_path: Path) -> None:
    env = models_file(
        tmp_path, '[[models]]\nmodel = "/nowhere/a"\n[[models]]\nmodel = "/nowhere/b"\n'
    )
    penstock = Launched(tmp_path, env)
    with pytest.raises(AssertionError, match="ended with 2"):
        penstock.start()
    assert "PENSTOCK_MODEL='/nowhere/a'" in penstock.output
    assert "PENSTOCK_MODEL='/nowhere/b'" in penstock.output


def test_a_bad_file_ends_with_a_sentence(tmp_path: Path) -> None:
    penstock = Launched(tmp_path, models_file(tmp_path, "[[models]]\nmodell = '/x'\n"))
    with pytest.raises(AssertionError, match="ended with 2"):
        penstock.start()
    assert "did you mean 'model'?" in penstock.output
    assert "Traceback" not in penstock.output
