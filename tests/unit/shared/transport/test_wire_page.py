"""docs/WIRE.md keeps up with the code."""

from __future__ import annotations

import re
from pathlib import Path

from shared.messages import ErrorCode
from shared.transport.job_records import _JOB_FIELDS
from shared.transport.scripts import load_sources
from shared.transport.wire import SCHEMA_VERSION
from tests.support.redis_server import KEYS_WITHOUT_TTL

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "WIRE.md").read_text(encoding="utf-8")


def test_every_transition_field_and_error_code_is_listed() -> None:
    listed = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert set(load_sources()) <= listed
    assert {field.decode() for field in _JOB_FIELDS} <= listed
    assert {code.value for code in ErrorCode} <= listed
    assert f"schema version is {SCHEMA_VERSION}." in PAGE


def test_exactly_the_documented_keys_have_no_ttl() -> None:
    rows = [line for line in PAGE.splitlines() if "| no TTL;" in line]
    names = {row.split("`")[1].removeprefix("P ") for row in rows}
    assert names == KEYS_WITHOUT_TTL | {"<namespace>:meta"}


def test_invariants_name_tests_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE)
    folder = ROOT / "tests/contract/shared/transport"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("test_*.py"))
    assert len(named) > 15
    assert [name for name in named if f"def {name}(" not in sources] == []
