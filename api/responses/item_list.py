"""Items in pages, as OpenAI lists them: newest first unless asked otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from api.paging import Page
from api.responses.items import Item
from shared.messages import InvalidParameter

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ORDERS = ("desc", "asc")


def items_of_page(items: Sequence[Item], order: str, page: Page) -> list[Item]:
    """One more than `page.limit` where there are more. Raises InvalidParameter."""
    if order not in ORDERS:
        raise InvalidParameter("order", f"must be one of {', '.join(ORDERS)}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = _behind(ordered, page.after)
    return ordered[begin : begin + page.limit + 1]


def _behind(items: Sequence[Item], item_id: str | None) -> int:
    if item_id is None:
        return 0
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index + 1
    raise InvalidParameter("after", "must be the id of an item of this list")
