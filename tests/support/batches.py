"""Batches over plain HTTP, from upload to the lines that answer."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.polling import wait_until


def begin_batch(
    client: httpx.Client, *bodies: dict[str, Any], url: str = "/v1/completions", **params: Any
) -> httpx.Response:
    """The response to a batch of a row for each body: "1", "2" and so on."""
    rows = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies, 1)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {"file": ("rows.jsonl", content)}
    file_id = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
    return client.post("/v1/batches", json={**asked, **params})


def ended_batch(client: httpx.Client, batch_id: str, timeout_s: float = 60) -> dict[str, Any]:
    """A batch as it is shown once it is completed or has failed."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(client.get(f"/v1/batches/{batch_id}").json())
        return found["status"] in ("completed", "failed")

    wait_until(has_ended, "the batch's end", timeout_s)
    return found


def batch_of(
    client: httpx.Client, body: dict[str, Any], which: str, url: str = "/v1/chat/completions"
) -> Any:
    """The one line that answers a row with this body."""
    batch = ended_batch(client, begin_batch(client, body, url=url).json()["id"])
    assert batch[which], batch
    return json.loads(client.get(f"/v1/files/{batch[which]}/content").content)
