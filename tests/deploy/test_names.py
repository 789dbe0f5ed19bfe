"""Images and versions have one name each in what builds, publishes and pulls them: the Dockerfiles,
the workflow of a release, docker-compose.yml and the chart."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.support.compose_file import ComposeFile
from tools.release import version

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy/helm/penstock"
JOBS = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())["jobs"]
ALL_IN_ONE = "penstock"  # of `docker run`; compose and the chart start its parts
# The file and the arguments that make an image what it is.
Build = tuple[str, dict[str, str]]


def dockerfiles() -> list[Path]:
    command = ["git", "ls-files", "*Dockerfile*"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [REPOSITORY / name for name in found.stdout.split()]


def published() -> dict[str, Build]:
    """Returns the images of the workflow."""
    rows = JOBS["images"]["strategy"]["matrix"]["include"]
    return {row["image"]: (row["file"], _arguments(row.get("args", ""))) for row in rows}


def _arguments(words: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words.split())


def of_compose() -> dict[str, Build]:
    """Returns the images that compose builds, with none of its variables set."""
    services = ComposeFile(REPOSITORY / "docker-compose.yml", {}).services.values()
    return {
        each.raw["image"]: (each.raw["build"]["dockerfile"], each.build_args)
        for each in services
        if "build" in each.raw
    }


def of_commands() -> dict[str, Build]:
    """Returns the images of the commands that stand in the Dockerfiles and in docs/DEPLOY.md."""
    found: dict[str, Build] = {}
    for path in (*dockerfiles(), REPOSITORY / "docs/DEPLOY.md"):
        for line in re.findall(r"(?m)^#? *(docker build .*\.)(?: +#.*)?$", path.read_text()):
            words = shlex.split(line)
            options = list(pairwise(words))
            (name,) = (value for option, value in options if option == "-t")
            files = [value for option, value in options if option == "-f"]
            arguments = " ".join(value for option, value in options if option == "--build-arg")
            built = (files[0] if files else "Dockerfile", _arguments(arguments))
            assert found.setdefault(name, built) == built, f"{path}: {line}"
    return found


def of_the_chart() -> set[str]:
    """Returns the names that its templates give to `penstock.image`."""
    text = "".join(path.read_text() for path in sorted((CHART / "templates").glob("*.yaml")))
    assert text.count('"penstock.image"') == 2, "a template whose image this does not read"
    chosen = re.findall(r"\$image := (.*)", text)
    return set(re.findall(r'"(penstock[\w-]*)"', " ".join(chosen))) | set(
        re.findall(r'"penstock.image" \(list \$ "([\w-]+)"', text)
    )


def test_every_image_that_compose_and_chart_start_is_published_as_they_build_it() -> None:
    assert of_compose() == {
        name: build for name, build in published().items() if name != ALL_IN_ONE
    }
    assert of_the_chart() == set(published()) - {ALL_IN_ONE}


def test_the_commands_of_the_pages_build_the_published_images() -> None:
    assert of_commands() == published()
    assert {build[0] for build in published().values()} == {
        str(path.relative_to(REPOSITORY)) for path in dockerfiles()
    }


def test_each_image_names_itself_and_the_version_of_the_tree() -> None:
    plain = {build[0]: name for name, build in published().items() if not build[1]}
    for path in dockerfiles():
        text = path.read_text()
        assert f'image.title="{plain[str(path.relative_to(REPOSITORY))]}"' in text
        assert re.findall(r"(?m)^ARG VERSION=(.*)$", text) == [version()]


def test_the_chart_pulls_the_tag_that_its_release_pushes() -> None:
    """A tag vX.Y.Z gives the images X.Y.Z; the chart's default is its appVersion."""
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version(), version())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["image"]["tag"] == ""
    names = [step["with"] for step in JOBS["images"]["steps"] if step.get("id") == "names"]
    assert names[0]["images"] == "ghcr.io/${{ github.repository_owner }}/${{ matrix.image }}"
    assert "type=semver,pattern={{version}}" in names[0]["tags"].split()
    assert JOBS["chart"]["needs"] == ["images"]


def test_the_published_chart_names_the_registry_that_the_images_are_pushed_to() -> None:
    (package, push) = (step["run"] for step in JOBS["chart"]["steps"] if "run" in step)
    assert 'registry="ghcr.io/${GITHUB_REPOSITORY_OWNER,,}"' in package
    # What the workflow replaces is there to be replaced, once.
    (replaced,) = re.findall(r"s\|\^(.*?)\$\|", package.replace("\\", ""))
    assert (CHART / "values.yaml").read_text().splitlines().count(replaced) == 1
    assert f"{CHART.name}-${{GITHUB_REF_NAME#v}}.tgz" in push


def test_the_image_of_everything_shares_the_layers_of_the_worker() -> None:
    """The compiler and torch are built, pushed and pulled once."""
    first, second = (
        re.findall(
            r"(?ms)^FROM \$\{BASE\}\n(.*?TORCH_PIP_ARGS\}\n)", (REPOSITORY / name).read_text()
        )
        for name in ("Dockerfile", "worker/Dockerfile")
    )
    assert first == second != []
