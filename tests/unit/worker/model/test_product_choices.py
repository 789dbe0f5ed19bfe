"""Which way computes a product of many rows, by what the ways took; measured once on a machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.model.cpu.choices import (
    AMX,
    AVX,
    ONEDNN,
    Choice,
    ProductChoices,
    ProductShape,
    Times,
    choices_path,
    choose,
)

SHAPE = ProductShape(3072, 1024, True)
NUM_BYTES = 3072 * 1024


class Meter:
    """Tells times and counts how often it was asked."""

    def __init__(self, times: Times) -> None:
        self.times = times
        self.shapes: list[ProductShape] = []

    def __call__(self, shape: ProductShape) -> Times:
        self.shapes.append(shape)
        return self.times


COPY_PAYS = {AVX: (1.0, 4.0), ONEDNN: (0.5, 2.0)}


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({AVX: (1.0, 4.0)}, Choice()),
        ({AVX: (1.0, 4.0), ONEDNN: (0.9, 3.6)}, Choice()),  # not worth a second copy
        (COPY_PAYS, Choice(copy_rows=64)),
        ({AVX: (1.0, 4.0), ONEDNN: (1.0, 2.0)}, Choice(copy_rows=256)),
        ({AVX: (1.0, 4.0), ONEDNN: (0.5, 4.0)}, Choice()),  # what is many may be more than 256
        ({AVX: (1.0, 4.0), AMX: (0.2, 0.8)}, Choice(amx_rows=64)),
        ({AVX: (1.0, 4.0), AMX: (1.0, 0.8)}, Choice(amx_rows=256)),
        ({AVX: (1.0, 4.0), AMX: (1.0, 4.0)}, Choice()),
        # oneDNN is compared with the best of what needs no copy.
        ({AVX: (1.0, 4.0), AMX: (0.5, 2.0), ONEDNN: (0.45, 1.8)}, Choice(amx_rows=64)),
        (
            {AVX: (1.0, 4.0), AMX: (0.5, 2.0), ONEDNN: (0.3, 1.0)},
            Choice(amx_rows=64, copy_rows=64),
        ),
    ],
)
def test_the_quickest_way_is_chosen(times: Times, choice: Choice) -> None:
    assert choose(times) == choice


def test_a_shape_is_measured_once_on_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    for _ in range(2):
        meter = Meter({AVX: (1.0, 4.0), AMX: (0.5, 2.0)})
        choices = ProductChoices(meter, path, copies="on", free_bytes=lambda: 0)
        for _layer in range(3):
            assert choices.of(SHAPE, NUM_BYTES) == Choice(amx_rows=64)
        choices.of(ProductShape(3072, 1024, False), NUM_BYTES)
    assert meter.shapes == [], "the second start reads what the first one measured"
    assert set(json.loads(path.read_text())) == {"3072x1024 gated", "3072x1024"}


def test_what_speaks_for_a_copy_is_measured_again_and_the_best_times_count(tmp_path: Path) -> None:
    """What was measured beside a busy process would else cost every later start a copy."""
    path = tmp_path / "products.json"
    found = []
    for times in (COPY_PAYS, {AVX: (0.5, 2.0), ONEDNN: (0.6, 2.4)}, COPY_PAYS):
        meter = Meter(times)
        choices = ProductChoices(meter, path, copies="on", free_bytes=lambda: 0)
        found.append([choices.of(SHAPE, NUM_BYTES) for _layer in range(2)])
        found[-1].append(len(meter.shapes))
    assert found == [
        [Choice(copy_rows=64), Choice(copy_rows=64), 1],
        [Choice(), Choice(), 1],
        [Choice(), Choice(), 0],
    ]


@pytest.mark.parametrize(
    "kept",
    [
        b"\xff",
        b"{",
        b"[]",
        b'{"3072x1024 gated": 3}',
        b'{"3072x1024 gated": {"ours": [1.0]}}',
        b'{"3072x1024 gated": {"ours": [1.0, -1.0]}}',
        b'{"3072x1024 gated": {"ours": [1.0, "x"]}}',
    ],
)
def test_a_file_that_cannot_be_read_is_measured_anew(kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    path.write_bytes(kept)
    meter = Meter(COPY_PAYS)
    assert ProductChoices(meter, path, copies="on", free_bytes=lambda: 0).of(
        SHAPE, NUM_BYTES
    ) == Choice(copy_rows=64)
    assert meter.shapes == [SHAPE]
    assert json.loads(path.read_text())[SHAPE.name][AVX] == [1.0, 4.0]


def test_a_place_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "products.json"
    choices = ProductChoices(Meter(COPY_PAYS), path, copies="on", free_bytes=lambda: 0)
    assert choices.of(SHAPE, NUM_BYTES) == Choice(copy_rows=64)


def test_small_weights_are_not_worth_measuring() -> None:
    meter = Meter(COPY_PAYS)
    choices = ProductChoices(meter, None, copies="on", free_bytes=lambda: 0)
    assert choices.of(ProductShape(1024, 192, True), 2 * 1024 * 192) == Choice()
    assert meter.shapes == []


def test_copies_are_held_as_far_as_the_memory_allows() -> None:
    auto = ProductChoices(Meter(COPY_PAYS), None, copies="auto", free_bytes=lambda: 2 * NUM_BYTES)
    assert [auto.of(SHAPE, NUM_BYTES).copy_rows for _ in range(3)] == [64, 64, 0]
    always = ProductChoices(Meter(COPY_PAYS), None, copies="on", free_bytes=lambda: 0)
    assert always.of(SHAPE, NUM_BYTES).copy_rows == 64
    never = ProductChoices(
        Meter(COPY_PAYS | {AMX: (0.8, 3.0)}), None, copies="off", free_bytes=10**9
    )
    assert never.of(SHAPE, NUM_BYTES) == Choice(amx_rows=64)


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    facts = {"cpu": "a", "threads": "2"}
    assert choices_path(tmp_path, facts) == choices_path(tmp_path, {"threads": "2", "cpu": "a"})
    assert choices_path(tmp_path, facts) != choices_path(tmp_path, facts | {"threads": "4"})
