"""ModelCatalog: the models that requests can name, with their cards, tokenizers and templates.

These are the models that live workers serve or offer, those served lately and of KEEP_MODELS,
whose jobs wait in the queue. Workers publish cards and text files, and each content is loaded once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from api.dependencies import provided
from api.errors import UnavailableError, unavailable
from api.generation.sampling import ContextBudget
from api.generation.thread_pool import TextPool, client_gone, request_bytes
from api.http.shares import payer
from api.request_errors import model_not_found, wrong_task
from shared.messages import Durability, InvalidParameter
from shared.tasks import cancel_and_wait
from shared.text.base import TextInvalid
from shared.text.model_card import ModelCard, SamplingDefaults, TextModel
from shared.transport.ports.jobs import TransportError
from shared.transport.ports.registry import AnnouncedModel, Offer, WorkerRegistry

log = logging.getLogger(__name__)

Task = Literal["generate", "embed"]

MIXED_ENGINES = "mixed"  # a card's engine where workers of one model differ
MAX_TEXTS = 16  # text sides kept, served or not, unless more models can be named
UNUSED_TEXT_S = 300.0  # that the text side of a model that has left is kept
MAX_SEEN = 256  # names remembered after their workers left
MIN_REFRESH_S = 0.2  # between refreshes that requests cause
UNSERVED_RETRY_S = 5.0  # Retry-After while no worker serves: when one comes is unknown
LOAD_RETRY_S = 5.0  # until a text that could not be loaded now is loaded again
MAX_WAIT_S = 10.0  # that a request waits for a model's text to load


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a request can name."""

    card: ModelCard
    text: TextModel
    is_served: bool = True  # by a live worker; else its jobs wait until one comes
    is_paused: bool = False  # an operator has paused its queue: its jobs wait
    offer: Offer | None = None  # of workers that load it when jobs wait for it
    load_failed: bool = False  # such a worker could not load it
    defaults: SamplingDefaults = field(init=False, compare=False)  # of the card, checked

    def __post_init__(self) -> None:
        defaults = SamplingDefaults.of(self.card.default_sampling)
        object.__setattr__(self, "defaults", defaults)

    @property
    def context_tokens(self) -> int:
        """Returns the most tokens of prompt and output that the model and its KV cache hold."""
        capacity = self.card.kv_capacity_tokens or self.card.max_model_len
        return min(self.card.max_model_len, capacity)

    def budget(self, prompt_tokens: int = 0) -> ContextBudget:
        return ContextBudget(
            self.context_tokens, self.card.vocab_size, prompt_tokens, self.defaults
        )


class ModelCatalog:
    """What the last look into the store found; `refresh` looks again.

    `load` runs on a thread of `pool`, see text_model.load_text. `retention_s`: how long a model
    that no live worker serves can still be named; `kept`: names of those that can always be
    named, once a worker has announced them.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        pool: TextPool,
        load: Callable[[ModelCard, Mapping[str, bytes]], TextModel],
        retention_s: float = 0.0,
        kept: Set[str] = frozenset(),
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._load = load
        self._retention_s = retention_s
        self._kept = kept
        self._known: dict[str, ServedModel] = {}
        self._texts: OrderedDict[object, TextModel] = OrderedDict()
        self._used_s: dict[object, float] = {}  # when each of them was last asked for
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._refused: dict[str, bytes] = {}  # cards that could not be used, to log each once
        self._load_again_s: dict[str, float] = {}  # by name: when to load what could not be loaded
        self._looking: asyncio.Task[None] | None = None
        self._looked_s = -MIN_REFRESH_S
        self._reachable = False

    @property
    def known(self) -> Mapping[str, ServedModel]:
        """Returns the models that a request can name, by name."""
        return self._known

    async def keep(self) -> None:
        """Keeps cards and text files of the models that are to be kept. Raises TransportError."""
        digests = {
            name: model.card.digests for name, model in self._known.items() if name in self._kept
        }
        await self._registry.keep_models(digests)

    async def refresh(self) -> None:
        """Reads the store. Raises TransportError; the known models stay known then."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        await asyncio.shield(self._looking)

    async def require(self, name: str, task: Task | None = "generate") -> ServedModel:
        """Returns the model of that name, which has to do `task`; None: whatever it does.

        Raises ClientError (404) for an unknown model, UnavailableError (503) for one whose
        workers have been gone for too long, and when no model is known at all, and
        InvalidParameter for a model of another task."""
        return _of_task(await self._named(name), task)

    async def _named(self, name: str) -> ServedModel:
        model = self._known.get(name)
        if model is None:
            await self._look_now()
            model = self._known.get(name)
        if model is not None:
            return model
        if not self._reachable:
            raise unavailable("The job store cannot be reached now. Try again soon.")
        if name in self._load_again_s:
            raise unavailable("This model's text could not be loaded now. Try again soon.")
        if name in self._seen:
            raise unavailable(
                "No worker has served this model for a while: its requests are refused "
                "until one does. Try again later.",
                UNSERVED_RETRY_S,
            )
        if not self._known or name in self._kept:
            which = "this model" if name in self._kept else "a model"
            raise unavailable(
                f"No worker has announced {which} yet. Try again later.", UNSERVED_RETRY_S
            )
        raise model_not_found(name)

    async def only(self, name: str | None, task: Task | None = "generate") -> ServedModel:
        """Returns the model as `require` does; without a name the one that is served or known."""
        if name is not None:
            return await self.require(name, task)
        if not self._known:
            await self._look_now()
        if not self._known:
            return await self.require("", task)
        served = [model for model in self._known.values() if model.is_served]
        candidates = served or list(self._known.values())
        if len(candidates) > 1:
            raise InvalidParameter(
                "model",
                "Missing required parameter: 'model': several models are served.",
                "missing_required_parameter",
            )
        return _of_task(candidates[0], task)

    async def of_card(self, card: ModelCard) -> ServedModel:
        """Returns the model of a card that was kept, also when no worker serves it now.

        Raises TransportError, UnavailableError (503) when its text cannot be loaded now, and
        TextInvalid when its files are no longer stored.
        """
        return ServedModel(card, await self._text(card))

    async def aclose(self) -> None:
        if self._looking is not None:
            await cancel_and_wait(self._looking)
        for text in self._texts.values():
            text.close()

    async def _look_now(self) -> None:
        if self._looking is None and time.monotonic() - self._looked_s < MIN_REFRESH_S:
            return
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self.refresh()
        except TimeoutError:
            raise unavailable("The models are being loaded. Try again soon.") from None
        except TransportError:
            pass  # `_reachable` is False now

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        self._looked_s = time.monotonic()
        if not task.cancelled():
            task.exception()  # raised where the refresh is awaited

    async def _look(self) -> None:
        try:
            announced = await self._registry.models()
            known = {}
            for name, found in announced.items():
                if found.unserved_s > self._retention_s and not (found.offer or name in self._kept):
                    self._remember(name)
                    continue
                if (model := await self._served_model(name, found)) is not None:
                    known[name] = model
        except TransportError:
            self._reachable = False
            raise
        # Those that are served come first: clients that take the first one get an answer soonest.
        self._known = dict(sorted(known.items(), key=lambda item: not item[1].is_served))
        self._reachable = True
        for name in self._load_again_s.keys() - announced.keys():
            del self._load_again_s[name]
        for name in known:
            self._remember(name)
        await self._drop_unused()

    def _remember(self, name: str) -> None:
        self._seen[name] = None
        self._seen.move_to_end(name)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    async def _served_model(self, name: str, found: AnnouncedModel) -> ServedModel | None:
        blob = found.card
        if self._refused.get(name) == blob:
            return None
        if time.monotonic() < self._load_again_s.get(name, 0.0):
            return None
        self._load_again_s.pop(name, None)
        try:
            card = _of_all_workers(ModelCard.from_json(blob), found)
            text = await self._text(card)
            facts = (found.unserved_s == 0.0, found.is_paused, found.offer, found.load_failed)
            return ServedModel(card, text, *facts)
        except UnavailableError as error:  # temporary, and of this model only
            log.error(
                "failed to load the tokenizer or the chat template of a model",
                extra={"model": name, "reason": error.message},
            )
            self._load_again_s[name] = time.monotonic() + LOAD_RETRY_S
            return None
        except TextInvalid as error:
            log.error(
                "a model cannot be served by this frontend",
                extra={"model": name, "reason": str(error)},
            )
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
                blob = await self._registry.get_blob(digest)
                if blob is not None:
                    blobs[digest] = blob
            counted = request_bytes.set(sum(map(len, blobs.values())))  # no small work
            paid = payer.set(None)  # it is everybody's, and ends though a client has gone
            awaited = client_gone.set(None)
            try:
                text = await self._pool.run(self._load, card, blobs)
            finally:  # the caller may be a request
                client_gone.reset(awaited)
                payer.reset(paid)
                request_bytes.reset(counted)
            self._texts[key] = text
            log.info("the tokenizer and the chat template are loaded", extra={"model": card.name})
        self._texts.move_to_end(key)
        self._used_s[key] = time.monotonic()
        return text

    async def _drop_unused(self) -> None:
        """Drops texts that no look has asked for lately, and those above MAX_TEXTS that this one
        has not. Requests that hold one keep its process: it ends with the last of them."""
        unused_since_s = time.monotonic() - UNUSED_TEXT_S
        num_over = len(self._texts) - MAX_TEXTS
        unused = [
            key
            for at, key in enumerate(self._texts)  # those asked for the longest ago first
            if self._used_s[key] < (self._looked_s if at < num_over else unused_since_s)
        ]
        texts = [self._texts.pop(key) for key in unused]
        for key in unused:
            del self._used_s[key]
        if texts:
            await asyncio.to_thread(texts.clear)  # a process takes a moment to end


def _of_task(model: ServedModel, task: Task | None) -> ServedModel:
    """Raises InvalidParameter for a model that does something else."""
    if task is not None and (task == "embed") != bool(model.card.embedding_size):
        raise wrong_task(model.card.name, task)
    return model


def _of_all_workers(card: ModelCard, found: AnnouncedModel) -> ModelCard:
    """Returns the card, one worker's, with the limits that hold for every live worker."""
    if len(found.engines) > 1:
        card = replace(card, engine=MIXED_ENGINES, engine_version="")
    return replace(
        card,
        exact_resume=card.exact_resume and found.exact_resume,
        structured_output=card.structured_output and found.structured_output,
        max_model_len=_least(card.max_model_len, found.max_model_len),
        # 0: not known
        kv_capacity_tokens=_least(card.kv_capacity_tokens, found.kv_capacity_tokens or None),
    )


def _least(of_card: int, of_workers: int | None) -> int:
    if of_workers is None:
        return of_card
    return min(of_card or of_workers, of_workers)


@dataclass(frozen=True, slots=True)
class JobDefaults:
    """Defaults of a job's parameters. `queue_timeout_s` 0: no limit."""

    timeout_s: float
    queue_timeout_s: float
    durability: Durability
    retention_ms: int  # of an ended job whose request has `store: true`
    max_retention_ms: int  # the most that `expires_after` may ask for


@dataclass(frozen=True, slots=True)
class GenerationService:
    """What every dialect needs to make a job of a request; made once a process.

    `max_response_bytes`: the most that a response may come to, by its worst case.
    """

    models: ModelCatalog
    pool: TextPool
    max_response_bytes: int
    job_defaults: JobDefaults


GenerationDep = Annotated[GenerationService, provided(GenerationService)]
