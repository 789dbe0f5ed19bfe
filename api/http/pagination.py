"""Pages of a list, as OpenAI's: `after` and `limit` in, `has_more` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from api.errors import unknown_parameter
from api.http.json_response import json_response
from shared.messages import InvalidParameter

MAX_ID_CHARS = 200
MAX_DIGITS = 6

Item = TypeVar("Item")

Absent = SkipJsonSchema[None]  # left out, and never null


class QueryModel(BaseModel):
    """The parameters of a query string; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class ListQuery(QueryModel):
    """A query with the `limit` of a list, which a route declares with its bounds."""

    limit: int

    @field_validator("limit", mode="before")
    @classmethod
    def _check_digits(cls, value: Any) -> Any:
        """Refuses other notations of numbers, which pydantic would read."""
        is_digits = str(value).isascii() and str(value).isdigit()
        if not is_digits or len(str(value)) > MAX_DIGITS:
            raise PydanticCustomError("digits", "Input should be a whole number")
        return value


class PageQuery(ListQuery):
    """A query for what follows the object with the id `after`."""

    after: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | Absent = Field(
        None, description="The id of the last one that was read."
    )


async def _no_query(query: Annotated[QueryModel, Query()]) -> None:
    """Refuses every parameter."""


NO_QUERY = Depends(_no_query)  # of a route without parameters


class ListPage(BaseModel, Generic[Item]):
    """A page of a list of objects with an `id`."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Any], limit: int) -> Self:
        """Returns the page of the first `limit` items; one more item says that there are more."""
        shown = items[:limit]
        return cls(
            data=list(shown),
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(items) > limit,
        )


@dataclass(frozen=True, slots=True)
class Page:
    """At most `limit` of what follows the object with the id `after`."""

    after: str | None
    limit: int


def page_of(request: Request, default: int, most: int, also: Sequence[str] = ()) -> Page:
    """`also`: query parameters that the route knows beside these. Raises InvalidParameter."""
    query = request.query_params
    for name in query:
        if name not in ("after", "limit", *also):
            raise unknown_parameter(name)
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= limit <= most:
        raise InvalidParameter("limit", f"must be between 1 and {most}")
    after = query.get("after")
    if after is not None and not 0 < len(after) <= MAX_ID_CHARS:
        raise InvalidParameter("after", f"must have 1 to {MAX_ID_CHARS} characters")
    return Page(after, limit)


def page_response(payloads: Sequence[dict[str, Any]], page: Page) -> Response:
    """`payloads`: one more than `page.limit` where there are more."""
    shown = payloads[: page.limit]
    return json_response(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(payloads) > page.limit,
        }
    )
