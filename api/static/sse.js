/**
 * Server-sent events out of a fetch response, as the HTML standard parses them.
 *
 * EventSource can neither POST nor distinguish a reconnect, so the pages read the body
 * themselves. Nothing is assumed about chunk borders: they may fall inside a character, a line
 * or between a CR and its LF.
 */

export const MAX_BUFFERED_CHARS = 4 * 1024 * 1024;

/** Feed it decoded text in any pieces; it calls `onEvent({event, data, id})` per whole event. */
export class SseParser {
  #onEvent;
  #line = "";
  #afterCr = false;
  #data = [];
  #event = "";
  #id = "";
  #numBuffered = 0;

  constructor(onEvent) {
    this.#onEvent = onEvent;
  }

  push(text) {
    let start = 0;
    if (this.#afterCr && text.length > 0) {
      if (text[0] === "\n") start = 1;
      this.#afterCr = false;
    }
    const lineEnd = /[\r\n]/g;
    for (;;) {
      lineEnd.lastIndex = start;
      const found = lineEnd.exec(text);
      if (found === null) break;
      const line = this.#line + text.slice(start, found.index);
      this.#line = "";
      start = found.index + 1;
      if (found[0] === "\r") {
        if (start === text.length) this.#afterCr = true;
        else if (text[start] === "\n") start += 1;
      }
      this.#takeLine(line);
    }
    this.#line += text.slice(start);
    if (this.#line.length + this.#numBuffered > MAX_BUFFERED_CHARS) {
      throw new RangeError("An event of the stream is too long.");
    }
  }

  #takeLine(line) {
    if (line === "") {
      this.#dispatch();
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment, such as a keep-alive
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") {
      this.#data.push(value);
      this.#numBuffered += value.length;
    } else if (field === "event") {
      this.#event = value;
    } else if (field === "id" && !value.includes("\0")) {
      this.#id = value;
    }
  }

  #dispatch() {
    const data = this.#data;
    const event = this.#event || "message";
    this.#data = [];
    this.#event = "";
    this.#numBuffered = 0;
    if (data.length > 0) this.#onEvent({ event, data: data.join("\n"), id: this.#id });
  }
}

/**
 * Yields the events of a byte stream (a response's body) as they become whole. An event that the
 * end of the stream cuts off is dropped, as in the standard. Leaving the loop cancels the body.
 * `onBytes` is called for whatever arrives, keep-alives too.
 */
export async function* readEvents(body, onBytes = () => {}) {
  let ready = [];
  const parser = new SseParser((event) => ready.push(event));
  const decoder = new TextDecoder(); // keeps a split character; drops a byte order mark
  const reader = body.getReader();
  let ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      onBytes();
      parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      const events = ready;
      ready = [];
      yield* events;
      if (done) {
        ended = true;
        return;
      }
    }
  } finally {
    // A cancel of an aborted body rejects; the reason has been thrown by read() already.
    if (!ended) await reader.cancel().catch(() => {});
  }
}
