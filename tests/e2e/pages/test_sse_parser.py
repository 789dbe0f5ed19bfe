"""The pages' parser of server-sent events, in a real browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

pytestmark = pytest.mark.browser

SPLITS = """
async ([bytes, sizes]) => {
  const { readEvents } = await import("/static/sse.js");
  const results = [];
  for (const size of sizes) {
    const body = new ReadableStream({
      start(controller) {
        const all = Uint8Array.from(bytes);
        for (let at = 0; at < all.length; at += size) controller.enqueue(all.slice(at, at + size));
        controller.close();
      },
    });
    const events = [];
    for await (const event of readEvents(body)) events.push(event);
    results.push(events);
  }
  return results;
}
"""


def test_events_are_the_same_however_the_bytes_are_cut(playground: Page) -> None:
    stream = (
        "\ufeff: hello\n\n"
        'data: {"text": "höß 🌊 漢字"}\n\n'
        ": ka\n"
        "id: 3-17\r\nevent: delta\r\ndata: one\r\ndata:two\r\n\r\n"
        "data: lone\rdata: returns\r\r"
        "retry: 10\nnonsense\n\n"
        "data\n\n"
        "data: [DONE]\n\n"
        "data: cut off"
    ).encode()
    expected = [
        {"event": "message", "data": '{"text": "höß 🌊 漢字"}', "id": ""},
        {"event": "delta", "data": "one\ntwo", "id": "3-17"},
        {"event": "message", "data": "lone\nreturns", "id": "3-17"},
        {"event": "message", "data": "", "id": "3-17"},
        {"event": "message", "data": "[DONE]", "id": "3-17"},
    ]
    sizes = [*range(1, 40), len(stream)]
    results = playground.evaluate(SPLITS, [list(stream), sizes])
    for size, events in zip(sizes, results, strict=True):
        assert events == expected, f"in pieces of {size} bytes"


def test_an_endless_event_is_refused(playground: Page) -> None:
    error = playground.evaluate(
        """async () => {
          const { MAX_BUFFERED_CHARS, SseParser } = await import("/static/sse.js");
          const parser = new SseParser(() => {});
          try {
            for (let sent = 0; sent <= MAX_BUFFERED_CHARS; sent += 65536) {
              parser.push("data: " + "x".repeat(65530) + "\\n");
            }
          } catch (error) {
            return error.name;
          }
        }"""
    )
    assert error == "RangeError"
