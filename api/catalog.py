"""ModelCatalog: the models that live workers serve, with their cards and text sides.

Everything comes out of the store, where workers publish it; a text side is loaded once per content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from api.errors import model_not_found, unavailable
from api.openai.sampling import Room
from api.tasks import stop_tasks
from api.text_pool import TextPool, request_bytes
from shared.messages import InvalidParameter
from shared.text.card import ModelCard, TextModel, load_text
from shared.text.errors import TextInvalid
from shared.text.rendering import RenderingProcesses
from shared.transport.base import JobStore, TransportError

log = logging.getLogger(__name__)

MAX_TEXTS = 16  # text sides kept, served or not
MAX_SEEN = 256  # names remembered after their workers left
MIN_REFRESH_S = 0.2  # between looks that requests ask for
MAX_WAIT_S = 10.0  # that a request waits for a model's text to load


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a request can name."""

    card: ModelCard
    text: TextModel

    @property
    def context_tokens(self) -> int:
        """Prompt and answer together: what the model and the cache of its worker hold."""
        capacity = self.card.kv_capacity_tokens or self.card.max_model_len
        return min(self.card.max_model_len, capacity)

    def room(self, prompt_tokens: int = 0) -> Room:
        return Room(self.context_tokens, self.card.vocab_size, prompt_tokens)


class ModelCatalog:
    """What the last look into the store found; `refresh` looks again."""

    def __init__(self, store: JobStore, pool: TextPool) -> None:
        self._store = store
        self._pool = pool
        self._rendering = RenderingProcesses()
        self._served: dict[str, ServedModel] = {}
        self._texts: OrderedDict[object, TextModel] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._refused: dict[str, bytes] = {}  # cards that could not be used, to say it once
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = -MIN_REFRESH_S
        self._reachable = False

    @property
    def served(self) -> Mapping[str, ServedModel]:
        return self._served

    async def refresh(self) -> None:
        """Looks into the store. Raises TransportError; what was known stays known then."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    async def require(self, name: str) -> ServedModel:
        """Raises CallerError (404) for an unknown model, UnavailableError (503) for one whose
        workers are gone, and when no model is served at all."""
        model = self._served.get(name)
        if model is None:
            await self._look_now()
            model = self._served.get(name)
        if model is not None:
            return model
        if not self._reachable:
            raise unavailable("The job store cannot be reached now. Try again soon.")
        if not self._served or name in self._seen:
            raise unavailable("No live worker serves this model now. Try again soon.", 5.0)
        raise model_not_found(name)

    async def only(self, name: str | None) -> ServedModel:
        """As `require`; without a name the one model that is served, if it is one."""
        if name is not None:
            return await self.require(name)
        if not self._served:
            await self._look_now()
        if not self._served:
            return await self.require("")
        if len(self._served) > 1:
            raise InvalidParameter(
                "model",
                "Missing required parameter: 'model': several models are served.",
                "missing_required_parameter",
            )
        return next(iter(self._served.values()))

    async def of_card(self, card: ModelCard) -> ServedModel:
        """The model of a card that was kept, also when no worker serves it now.

        Raises TransportError, and TextInvalid when its files are no longer stored.
        """
        return ServedModel(card, await self._text(card))

    async def aclose(self) -> None:
        if self._looking is not None:
            await stop_tasks(self._looking)
        self._rendering.close()

    async def _look_now(self) -> None:
        if self._looking is None and time.monotonic() - self._looked_s < MIN_REFRESH_S:
            return
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self.refresh()
        except TimeoutError:
            raise unavailable("The models are being loaded. Try again soon.") from None
        except TransportError:
            pass  # `_reachable` says it

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        self._looked_s = time.monotonic()
        if not task.cancelled():
            task.exception()  # whoever waited has it

    async def _look(self) -> None:
        try:
            cards = await self._store.models()
            served = {}
            for name, blob in cards.items():
                model = await self._served_model(name, blob)
                if model is not None:
                    served[name] = model
        except TransportError:
            self._reachable = False
            raise
        self._served = served
        self._reachable = True
        for name in served:
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    async def _served_model(self, name: str, blob: bytes) -> ServedModel | None:
        if self._refused.get(name) == blob:
            return None
        try:
            card = ModelCard.from_json(blob)
            return ServedModel(card, await self._text(card))
        except TextInvalid as error:
            log.error("model cannot be served", extra={"model": name, "reason": str(error)})
            if len(self._refused) < MAX_SEEN and "missing" not in str(error):
                self._refused[name] = blob
            return None

    async def _text(self, card: ModelCard) -> TextModel:
        special_tokens = tuple(sorted(card.special_tokens.items()))
        ids = (card.vocab_size, card.eos_token_ids)  # of its grammars
        key = (card.digests, special_tokens, card.markers, ids)
        text = self._texts.get(key)
        if text is None:
            blobs = {}
            for digest in card.digests:
                blob = await self._store.get_blob(digest)
                if blob is not None:
                    blobs[digest] = blob
            request_bytes.set(sum(map(len, blobs.values())))  # no small work
            text = await self._pool.run(load_text, card, blobs, self._rendering)
            self._texts[key] = text
            log.info("model text loaded", extra={"model": card.name})
        self._texts.move_to_end(key)
        while len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)
        return text
