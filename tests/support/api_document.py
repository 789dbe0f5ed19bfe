"""The OpenAPI document of a frontend, without a running one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from api.main import create_app
from api.settings import ApiSettings

JSON = "application/json"
_IDS = {
    "name": "0-x",
    "file_id": "file-0-x",
    "batch_id": "batch_0-x",
    "model_id": "x",
    "worker_id": "w",
}


@cache
def api_document() -> dict[str, Any]:
    """Returns the document that GET /openapi.json serves."""
    return create_app(ApiSettings(redis_url="redis://127.0.0.1:1")).openapi()


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each operation as `METHOD path` and its description."""
    for path, item in api_document()["paths"].items():
        for method, operation in item.items():
            yield f"{method.upper()} {path}", operation


def path_of_something(path: str) -> str:
    """Returns a documented path with ids that could be those of something."""
    return path.format_map(_IDS)


def json_routes() -> list[str]:
    """Returns the paths of the routes that read a JSON body."""
    return [
        route.split()[1]
        for route, operation in operations()
        if JSON in operation.get("requestBody", {}).get("content", {})
    ]
