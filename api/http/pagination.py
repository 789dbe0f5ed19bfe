"""Queries, which refuse unknown parameters, and pages of a list, as OpenAI's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import Depends, Query
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from api.http.openapi import Absent

MAX_ID_CHARS = 200
MAX_DIGITS = 16
MAX_LIMIT_DIGITS = 6

Item = TypeVar("Item")


class QueryModel(BaseModel):
    """The parameters of a query string; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, values: Any) -> Any:
        """Returns the parameters with at most one unknown: each of thousands would be an error."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = itertools.islice((name for name in values if name not in known), 1)
        return {name: values[name] for name in (*(known & values.keys()), *unknown)}


def _check_digits(value: Any) -> Any:
    """Refuses other notations of numbers, which pydantic would read."""
    text = str(value)
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS:
        raise PydanticCustomError("digits", "Input should be a whole number")
    return value


DIGITS = BeforeValidator(_check_digits)  # of a whole number, after its bounds


def _check_flag(value: Any) -> Any:
    if value not in (True, False, "true", "false"):
        raise PydanticCustomError("flag", "Input should be 'true' or 'false'")
    return value


Flag = Annotated[bool, BeforeValidator(_check_flag)]


class ListQuery(QueryModel):
    """A query with the `limit` of a list, whose bounds a subclass declares."""

    limit: int

    @field_validator("limit", mode="before")
    @classmethod
    def _check_limit(cls, value: Any) -> Any:
        if len(str(value)) > MAX_LIMIT_DIGITS:
            raise PydanticCustomError("digits", "Input should be a whole number")
        return _check_digits(value)


class PageQuery(ListQuery):
    """A query for the page after the object with the id `after`."""

    after: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | Absent = None


async def _no_query(query: Annotated[QueryModel, Query()]) -> None:
    """Refuses every parameter."""


NO_QUERY = Depends(_no_query)  # of a route without parameters


def _unchanged(record: Any) -> Any:
    return record


def _id_of(item: Any) -> str:
    item_id: str = item["id"] if isinstance(item, dict) else item.id
    return item_id


class ListPage(BaseModel, Generic[Item]):
    """A page of a list of objects with an `id`."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(
        cls, records: Sequence[Any], limit: int, item: Callable[[Any], Any] = _unchanged
    ) -> Self:
        """Returns the page of the first `limit` records; `has_more` if there is another record.

        `item` makes the object of a record. Those of `data` are made as it is iterated, which is
        once: a long list is encoded in pieces.
        """
        shown = records[:limit]
        return cls.model_construct(
            object="list",
            data=map(item, shown),
            first_id=_id_of(item(shown[0])) if shown else None,
            last_id=_id_of(item(shown[-1])) if shown else None,
            has_more=len(records) > limit,
        )
