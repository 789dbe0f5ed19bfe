"""The Lua files: whole, documented, and of the schema that Python writes."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from shared.keys import GROUP, NUM_LANES
from shared.messages import Cursor, Delta, FinishReason, JobState, Segment, TokenLogprob, Usage
from shared.transport.appends import APPEND_FIELDS, NUM_FIXED, append_arguments
from shared.transport.ports.queue import Append, JobEnd
from shared.transport.scripts import load_sources
from shared.transport.wire import SCHEMA_VERSION, chain_hash
from tests.support.table import table

FOLDER = Path(str(resources.files("shared.transport"))) / "lua"
TRANSITIONS = sorted(load_sources())


def test_every_file_of_the_library_is_included() -> None:
    texts = "".join(path.read_text() for path in FOLDER.glob("*.lua"))
    for part in (FOLDER / "lib").glob("*.lua"):
        assert f"--@include lib/{part.name}\n" in texts


@table("name", TRANSITIONS)
def test_each_script_documents_its_arguments_and_reply(name: str) -> None:
    header = (FOLDER / f"{name}.lua").read_text().split("--@include")[0]
    assert header.startswith(f"-- {name}: ")
    assert "-- Returns " in header


@table("name", TRANSITIONS)
def test_a_loaded_transition_has_its_includes_and_sets_no_global(name: str) -> None:
    source = load_sources()[name]
    assert "@include" not in source
    assert not re.search(r"^function ", source, re.MULTILINE)


@table("name", TRANSITIONS)
def test_a_loaded_transition_has_fewer_locals_than_lua_allows(name: str) -> None:
    """Lua refuses a script with more than 200 locals of a block, when it is loaded."""
    declared = re.findall(
        r"^local (?:function (\w+)|([\w, ]+?) *(?:=|--|$))", load_sources()[name], re.MULTILINE
    )
    num_locals = sum(len((function or names).split(",")) for function, names in declared)
    assert 0 < num_locals <= 190


@table("name", TRANSITIONS)
def test_in_a_cluster_frames_go_to_sharded_channels(name: str) -> None:
    plain, sharded = load_sources()[name], load_sources(is_sharded=True)[name]
    assert plain.count("local PUBLISH = 'PUBLISH'\n") == 1
    assert sharded.count("local PUBLISH = 'SPUBLISH'\n") == 1
    assert "'PUBLISH'" not in sharded


def test_lua_and_python_agree_on_constants() -> None:
    common = (FOLDER / "lib" / "common.lua").read_text()
    assert f"local SCHEMA_VERSION = {SCHEMA_VERSION} " in common
    assert f"local GROUP = '{GROUP}'" in common
    for name in ("recover", "position"):
        assert f"for lane = 0, {NUM_LANES - 1} do" in (FOLDER / f"{name}.lua").read_text()


def test_lua_reads_an_items_arguments_in_the_order_in_which_python_writes_them() -> None:
    source = (FOLDER / "append.lua").read_text()
    assert f"local FIXED = {NUM_FIXED}\n" in source
    assert f"then per item {NUM_FIXED}:" in source
    assert f"ARGV[i + {APPEND_FIELDS.index('num_more')}]" in source
    read = re.findall(r"(\w+) = ARGV\[i(?: \+ (\d+))?\]", source)
    assert [(name, int(offset or 0)) for name, offset in read] == [
        (name, offset) for offset, name in enumerate(APPEND_FIELDS[1:-1], start=1)
    ]


def test_an_item_counts_the_arguments_that_follow_it() -> None:
    here, there = Cursor(0, 0), Cursor(1, 1)
    plain = append_arguments(Append("0-a", 1, Delta(here, there, (5,), "a"), "", "x"))
    assert len(plain) == NUM_FIXED
    assert plain[-1] == 0
    delta = Delta(here, there, (5,), "a", (TokenLogprob(5, -1.0),), (Segment(0, 1, 1),))
    end = JobEnd(JobState.FINISHED, FinishReason.STOP, Usage(3, 1, 2))
    whole = append_arguments(Append("0-a", 1, delta, "", "x", end, num_prompt_slices=2))
    assert whole[NUM_FIXED - 1] == len(whole) - NUM_FIXED
    named = whole[NUM_FIXED::2]
    assert named == ["c", "lp", "cached", "state", "reason", "tail", "slice"]
    source = (FOLDER / "append.lua").read_text()
    assert all(f"more.{name}" in source for name in [*named, "scores"])


def test_a_chain_is_equal_exactly_for_equal_histories() -> None:
    whole = chain_hash("", (1, 2, 3))
    assert chain_hash(chain_hash("", (1,)), (2, 3)) == whole
    assert chain_hash("", ()) == ""
    assert len({chain_hash("", ids) for ids in ((1, 2, 3), (12, 3), (1, 23), (3, 2, 1))}) == 4
    assert whole == chain_hash("", iter((1, 2, 3)))
    assert re.fullmatch(r"[0-9a-f]{16}", whole)
