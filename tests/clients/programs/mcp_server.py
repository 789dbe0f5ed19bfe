"""A server of the Model Context Protocol on standard input and output, with one tool."""

from __future__ import annotations

import json
import sys
from typing import Any

LEVEL = "seven metres"
MEASURE = {
    "name": "measure",
    "description": "Measures the water at a gate.",
    "inputSchema": {
        "type": "object",
        "properties": {"gate": {"type": "string"}, "note": {"type": "string"}},
        "required": ["gate"],
    },
}
LISTS = {
    "tools/list": {"tools": [MEASURE]},
    "resources/list": {"resources": []},
    "resources/templates/list": {"resourceTemplates": []},
    "prompts/list": {"prompts": []},
    "tools/call": {"content": [{"type": "text", "text": LEVEL}]},
}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Returns what a request gets."""
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "gauge", "version": "1"},
        }
    return LISTS.get(method, {})


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            reply = result(request["method"], request.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": reply}), flush=True)
