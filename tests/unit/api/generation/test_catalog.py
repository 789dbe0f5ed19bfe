"""The catalog knows what is served, and tells apart the ways in which a model is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.errors import ApiError
from api.generation import models as catalog_module
from api.generation.models import ModelCatalog
from api.generation.thread_pool import TextPool, request_bytes
from shared.messages import InvalidParameter
from shared.text.base import RenderingUnavailable
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.model_card import ModelCard, TextModel
from shared.text.text_model import load_text
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.registry import AnnouncedModel
from tests.support.checkpoints import make_checkpoint


class Store:
    def __init__(self) -> None:
        self.cards: dict[str, bytes] = {}
        self.unserved_s: dict[str, float] = {}
        self.engines: tuple[str, ...] = ()
        self.exact_resume = True
        self.found: dict[str, Any] = {}  # further members of what is announced
        self.kept: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.is_away = False
        self.fetched: list[str] = []

    async def models(self) -> dict[str, AnnouncedModel]:
        if self.is_away:
            raise TransportError("away")
        return {
            name: AnnouncedModel(
                card,
                self.unserved_s.get(name, 0.0),
                self.engines,
                self.exact_resume,
                **self.found,
            )
            for name, card in self.cards.items()
        }

    async def keep_models(self, digests: Mapping[str, Sequence[str]]) -> None:
        assert all(digest in self.blobs for ones in digests.values() for digest in ones)
        self.kept = list(digests)

    async def get_blob(self, digest: str) -> bytes | None:
        self.fetched.append(digest)
        return self.blobs.get(digest)

    def serve(self, checkpoint: Path, name: str, kv_capacity_tokens: int = 0) -> None:
        card, blobs = card_from_checkpoint(
            checkpoint,
            name=name,
            max_model_len=64,
            kv_capacity_tokens=kv_capacity_tokens,
            dtype="float32",
            num_parameters=1,
        )
        self.cards[name] = card.to_json()
        self.blobs.update(blobs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("catalog") / "tiny")


@pytest.fixture
def pool() -> Iterator[TextPool]:
    made = TextPool(threads=1, max_waiting_bytes=2**20)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MIN_REFRESH_S", 0.0)


async def refused(catalog: ModelCatalog, name: str) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as caught:
        await catalog.require(name)
    return caught.value.status, caught.value.code


async def test_each_way_of_not_being_served_has_its_own_answer(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.is_away = True
    assert await refused(catalog, "m") == (503, "service_unavailable")
    store.is_away = False
    assert await refused(catalog, "m") == (503, "service_unavailable")  # no worker at all
    store.serve(checkpoint, "m")
    store.serve(checkpoint, "other")
    assert (await catalog.require("m")).card.name == "m"
    assert await refused(catalog, "nobody") == (404, "model_not_found")
    store.unserved_s["m"] = 1.0
    await catalog.refresh()
    assert await refused(catalog, "m") == (503, "service_unavailable")  # its workers are gone


async def test_a_model_promises_what_all_its_workers_keep(checkpoint: Path, pool: TextPool) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "m")
    store.engines = ("vllm",)

    async def seen() -> tuple[str, bool]:
        await catalog.refresh()
        card = (await catalog.require("m")).card
        return card.engine, card.exact_resume

    card = ModelCard.from_json(store.cards["m"])
    store.cards["m"] = replace(card, engine="vllm", engine_version="0.32.0").to_json()
    assert await seen() == ("vllm", True)
    store.exact_resume = False  # another worker's: the card is the last one's that announced
    assert await seen() == ("vllm", False)
    store.engines = ("penstock", "vllm")
    assert await seen() == ("mixed", False)
    assert (await catalog.require("m")).card.engine_version == ""


async def test_a_request_is_admitted_by_the_least_of_its_models_workers(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "m", kv_capacity_tokens=640)
    card = ModelCard.from_json(store.cards["m"])
    store.cards["m"] = replace(card, structured_output=True).to_json()

    async def seen() -> tuple[int, int, int, bool]:
        await catalog.refresh()
        model = await catalog.require("m")
        card = model.card
        return (
            card.max_model_len,
            card.kv_capacity_tokens,
            model.context_tokens,
            card.structured_output,
        )

    assert await seen() == (64, 640, 64, True), "no worker has reported any"
    store.found = {"max_model_len": 2000, "kv_capacity_tokens": 4000}
    assert await seen() == (64, 640, 64, True), "the card is the least one's"
    store.found = {"max_model_len": 32, "kv_capacity_tokens": 16, "structured_output": False}
    assert await seen() == (32, 16, 16, False)


async def test_a_model_that_was_served_lately_can_be_named_and_one_that_is_kept_for_ever(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    kept = frozenset({"kept", "never"})
    catalog = ModelCatalog(store, pool, load_text, 600.0, kept)  # type: ignore[arg-type]
    for name in ("kept", "lately"):
        store.serve(checkpoint, name)
        store.unserved_s[name] = 599.0
    assert not (await catalog.require("lately")).is_served
    store.serve(checkpoint, "now")
    await catalog.refresh()
    assert list(catalog.known) == ["now", "kept", "lately"], "those that are served first"
    assert (await catalog.only(None)).card.name == "now", "the one that is served"
    store.unserved_s.update(kept=10**6, lately=601.0)
    assert (await catalog.require("kept")).card.name == "kept"
    await catalog.refresh()
    assert await refused(catalog, "lately") == (503, "service_unavailable")
    assert await refused(catalog, "never") == (503, "service_unavailable")
    assert await refused(catalog, "another") == (404, "model_not_found")
    await catalog.keep()
    assert store.kept == ["kept"]


async def test_a_text_is_loaded_once_per_content(checkpoint: Path, pool: TextPool) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "m")
    await catalog.refresh()
    fetched = len(store.fetched)
    store.serve(checkpoint, "m")
    store.serve(checkpoint, "twin")
    await catalog.refresh()
    assert len(store.fetched) == fetched
    assert catalog.known["m"].text is catalog.known["twin"].text


async def test_texts_of_all_models_are_kept_however_many_there_are(
    checkpoint: Path, pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "MAX_TEXTS", 2)
    store, loaded = Store(), []

    def load(card: ModelCard, blobs: Mapping[str, bytes]) -> TextModel:
        loaded.append(card.name)
        return load_text(card, blobs)

    catalog = ModelCatalog(store, pool, load)  # type: ignore[arg-type]
    names = ["a", "b", "c"]

    def serve(name: str) -> None:
        store.serve(checkpoint, name)
        card = replace(ModelCard.from_json(store.cards[name]), eos_token_ids=(ord(name),))
        store.cards[name] = card.to_json()

    for name in names:
        serve(name)
    for _ in range(3):
        await catalog.refresh()
    assert loaded == names
    for name in names[:2]:
        del store.cards[name]
    serve("d")
    await catalog.refresh()
    await catalog.refresh()
    assert loaded == [*names, "d"]
    assert len(catalog._texts) == 2, "those of models that have left go first"


async def test_a_model_may_go_unnamed_only_where_there_is_one(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "m")
    assert (await catalog.only(None)).card.name == "m"
    store.serve(checkpoint, "n")
    await catalog.refresh()
    with pytest.raises(InvalidParameter) as caught:
        await catalog.only(None)
    assert caught.value.param == "model"
    assert (await catalog.only("n")).card.name == "n"


async def test_what_cannot_be_read_is_left_out_and_logged(
    checkpoint: Path, pool: TextPool, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "m")
    store.cards["broken"] = b"{"
    await catalog.refresh()
    await catalog.refresh()
    assert list(catalog.known) == ["m"]
    assert [record.message for record in caplog.records].count(
        "a model cannot be served by this frontend"
    ) == 1


async def test_the_context_is_what_model_and_cache_both_hold(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    store.serve(checkpoint, "large")
    store.serve(checkpoint, "small", kv_capacity_tokens=40)
    await catalog.refresh()
    assert catalog.known["large"].context_tokens == 64
    assert catalog.known["small"].budget(10).left == 30


async def test_a_request_that_loads_a_text_counts_as_large_as_it_was(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    store.serve(checkpoint, "m")
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    request_bytes.set(100)
    await catalog.of_card(ModelCard.from_json(store.cards["m"]))
    assert request_bytes.get() == 100


async def test_a_model_whose_text_cannot_be_loaded_now_is_loaded_later_and_holds_up_no_other(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    store.serve(checkpoint, "m")
    store.serve(checkpoint, "other")
    loads: list[str] = []

    def load(card: ModelCard, blobs: Mapping[str, bytes]) -> TextModel:
        loads.append(card.name)
        if len(loads) == 1:
            raise RenderingUnavailable("rendering processes were killed")
        return load_text(card, blobs)

    catalog = ModelCatalog(store, pool, load)  # type: ignore[arg-type]
    await catalog.refresh()
    assert list(catalog.known) == ["other"]
    assert await refused(catalog, "m") == (503, "service_unavailable")
    catalog._load_again_s.clear()  # the time has come
    assert (await catalog.require("m")).card.name == "m"
    assert loads == ["m", "other"], "the two have one text"


async def test_the_text_of_a_model_that_has_left_is_dropped_and_one_in_use_is_not(
    checkpoint: Path, pool: TextPool
) -> None:
    store = Store()
    store.serve(checkpoint, "stays")
    store.serve(checkpoint, "leaves")
    card = ModelCard.from_json(store.cards["leaves"])
    store.cards["leaves"] = replace(card, eos_token_ids=(0,)).to_json()  # a text of its own
    catalog = ModelCatalog(store, pool, load_text)  # type: ignore[arg-type]
    await catalog.refresh()
    stays, leaves = (
        weakref.ref(catalog.known[name].text.tokenizer) for name in ("stays", "leaves")
    )
    store.cards.pop("leaves")
    await catalog.refresh()
    assert leaves() is not None, "it may come back soon"
    catalog._used_s = dict.fromkeys(catalog._used_s, float("-inf"))  # long ago
    await catalog.refresh()
    gc.collect()
    assert stays() is catalog.known["stays"].text.tokenizer
    assert leaves() is None
