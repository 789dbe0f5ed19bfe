"""The release workflow, the versions of the changelog, and the pages for contributors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.table import table
from tools.release import NotReady, check, main, sections, version

REPOSITORY = Path(__file__).resolve().parents[2]
WORKFLOW = REPOSITORY / ".github/workflows/release.yml"
CHANGELOG = "# Changelog\n\n## 0.2.0 - 2027-01-02\n\nnew\n\n## 0.1.0 - 2026-12-01\n\nold\n"


@table(
    ("schema", "pattern"),
    [
        ("github-workflows", "workflows/*.yml"),
        ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_workflows_and_issue_forms_follow_their_schemas(schema: str, pattern: str) -> None:
    files = sorted(map(str, (REPOSITORY / ".github").glob(pattern)))
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("check-jsonschema")),
            "--builtin-schema",
            f"vendor.{schema}",
            *files,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_checks_of_a_pull_request_are_the_targets_of_the_makefile() -> None:
    steps = yaml.safe_load((REPOSITORY / ".github/workflows/checks.yml").read_text())["jobs"]
    commands = " ".join(
        step["run"] for job in steps.values() for step in job["steps"] if "run" in step
    )
    targets = re.findall(r"\bmake ([a-z-]+)", commands)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert {"lint", "test-fast", "test", "test-packages"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    installed = set(re.findall(r"missing\+=\(([\w+.-]+)\)", (REPOSITORY / ".ci/run").read_text()))
    on_the_runner = {"chromium-headless-shell", "curl", "buildah", "mmdebstrap", "util-linux"}
    assert installed - on_the_runner <= set(commands.split())


def test_the_workflow_publishes_tags_alone() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["publish"]["environment"] == "pypi"
    (push,) = (
        step["with"]["push"] for step in jobs["images"]["steps"] if "push" in step.get("with", {})
    )
    assert "refs/tags/v" in push


def test_every_action_is_pinned_by_commit_with_its_version_beside_it() -> None:
    """A tag can be moved to other code; a commit cannot."""
    for workflow in sorted((REPOSITORY / ".github/workflows").iterdir()):
        used = re.findall(r"^ *(?:- )?uses: *(.*)$", workflow.read_text(), re.M)
        assert used, workflow
        for action in used:
            assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40} # v\d+(\.\d+){2}", action), action


def test_the_changelog_has_the_version_of_the_tree_first() -> None:
    found = sections((REPOSITORY / "CHANGELOG.md").read_text())
    assert next(iter(found)) == version()
    assert all(text for _, text in found.values())


def test_the_client_for_npm_has_the_version_of_the_tree_and_no_dependencies() -> None:
    client = REPOSITORY / "clients/typescript"
    package = json.loads((client / "package.json").read_text())
    assert package["version"] == version()
    assert "dependencies" not in package
    lock = json.loads((client / "package-lock.json").read_text())
    assert lock["version"] == version()


def test_a_release_is_of_one_version() -> None:
    assert check("v0.2.0", CHANGELOG, "0.2.0") == "new"


@table(
    ("tag", "changelog", "number", "words"),
    [
        ("v0.2.1", CHANGELOG, "0.2.0", "pyproject.toml has 0.2.0"),
        ("0.2.0", CHANGELOG, "0.2.0", "the tag is"),
        ("v0.3.0", CHANGELOG, "0.3.0", "no section"),
        ("v0.1.0", CHANGELOG, "0.1.0", "newer sections"),
        ("v0.2.0", CHANGELOG.replace("2027-01-02", "unreleased"), "0.2.0", "date"),
        ("v0.2.0", CHANGELOG.replace("\nnew\n", "\n"), "0.2.0", "an empty section"),
    ],
)
def test_what_is_no_release_is_named(tag: str, changelog: str, number: str, words: str) -> None:
    with pytest.raises(NotReady, match=re.escape(words)):
        check(tag, changelog, number)


def test_the_command_has_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "v9.9.9"]) == 1
    assert "v9.9.9" in capsys.readouterr().err
    assert main([]) == 2


@table("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_make_targets_that_a_page_names_exist(page: str) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", (REPOSITORY / page).read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), target
