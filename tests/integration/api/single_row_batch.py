"""A batch of one row, from upload to the line that answers it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx


def batch_of(
    client: httpx.Client, body: dict[str, Any], which: str, url: str = "/v1/chat/completions"
) -> Any:
    """The one line that answers a row with this body."""
    row = {"custom_id": "1", "method": "POST", "url": url, "body": body}
    file = client.post(
        "/v1/files",
        files={"file": ("rows.jsonl", json.dumps(row).encode())},
        data={"purpose": "batch"},
    ).json()
    begun = {
        "input_file_id": file["id"],
        "endpoint": url,
        "completion_window": "24h",
    }
    batch = client.post("/v1/batches", json=begun).json()
    deadline = time.monotonic() + 60
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    assert batch[which], batch
    return json.loads(client.get(f"/v1/files/{batch[which]}/content").content)
