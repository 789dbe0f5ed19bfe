"""EmbeddingFormatter: the vectors of a job as one object."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any

from api.errors import ApiError
from api.generation.choices import ChoiceEvent, ChoiceReader, ReaderOptions
from api.generation.formatter import Formatter
from api.generation.logprobs import PromptSlices
from shared.messages import NUMBER_BYTES, Finished, Pooling


class Vectors(PromptSlices):
    """The vectors of one job."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__(pooling.num_slices)
        self._vector_bytes = NUMBER_BYTES * pooling.dimensions

    def __iter__(self) -> Iterator[bytes]:
        for entries in self.slices:
            for at in range(0, len(entries), self._vector_bytes):
                yield entries[at : at + self._vector_bytes]


class EmbeddingFormatter(Formatter[None]):
    """OpenAI's list of embeddings. There is no stream of them."""

    kind = "embedding"

    def __init__(self, model: str, vectors: Vectors, *, as_base64: bool) -> None:
        super().__init__(ChoiceReader(ReaderOptions()))
        self._model = model
        self._vectors = vectors
        self._encoded = _base64 if as_base64 else _numbers

    def opening(self) -> Sequence[Any]:
        return ()

    def event(self, event: ChoiceEvent[None]) -> Sequence[Any]:
        return ()

    def failed(self, error: ApiError, last_sent: Any = None) -> Any:
        return error.body()

    def keep(self, event: ChoiceEvent[None]) -> None:
        """Keeps nothing: such a job has no text."""

    def body(self, end: Finished) -> Any:
        num_tokens = end.usage.prompt_tokens
        return {
            "object": "list",
            "data": (
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(self._vectors)
            ),
            "model": self._model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _base64(vector: bytes) -> str:
    return b64encode(vector).decode()


def _numbers(vector: bytes) -> list[float]:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
