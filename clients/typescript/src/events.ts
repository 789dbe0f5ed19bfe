/* Server-sent events, as a response brings them. */
import type { Json } from './answer.js';
import { PenstockError } from './errors.js';

/** One event; `name` is '' without an `event:` line, `data` is its JSON, null for `[DONE]` and where nothing is left. */
export interface Event {
  id: string;
  name: string;
  data: Json | null;
}

/** Collects lines into events: data lines are joined, comments are left out. */
class EventParser {
  private data: string[] = [];
  private id = '';
  private name = '';

  constructor(private url: string) {}

  /** Returns the event that a line ends, if it ends one. */
  line(line: string): Event | null {
    if (line === '') return this.end();
    const colon = line.indexOf(':');
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
    if (field === 'data') this.data.push(value);
    else if (field === 'id') this.id = value;
    else if (field === 'event') this.name = value;
    return null;
  }

  private end(): Event | null {
    const { id, name } = this;
    this.name = '';
    if (!this.data.length) return null;
    const text = this.data.join('\n');
    this.data = [];
    if (text === '[DONE]') return { id, name, data: null };
    try {
      return { id, name, data: JSON.parse(text) };
    } catch {
      throw new PenstockError(`${this.url} is not a Penstock frontend: it did not return JSON.`);
    }
  }
}

/** Yields the events of pieces of a body; one without its end is left out. */
export async function* eventsOf(pieces: AsyncIterable<Uint8Array>, url: string): AsyncGenerator<Event, void> {
  const parser = new EventParser(url);
  const decoder = new TextDecoder();
  let rest = '';
  for await (const piece of pieces) {
    // A carriage return at the end may be the first half of a line's end.
    const lines = (rest + decoder.decode(piece, { stream: true })).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop() ?? '';
    for (const line of lines) {
      const event = parser.line(line);
      if (event) yield event;
    }
  }
}
