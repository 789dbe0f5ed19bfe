"""The request of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from api.generation.prompt_member import EmbeddedInput
from api.generation.protocol import DisconnectPolicy, JobParameters, TierFields
from api.generation.response_schemas import ResponseModel
from api.generation.schemas import described
from shared.messages import OnDisconnect


class EmbeddingRequest(TierFields, JobParameters):
    """POST /v1/embeddings."""

    kind = "embedding"

    input: EmbeddedInput
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, described(minimum=1)] | None = None
    on_disconnect: DisconnectPolicy = OnDisconnect.CANCEL


# The response.


class Embedding(ResponseModel):
    """The vector of an input: a list of numbers, or base64 of float32 in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
