/* How requests are sent with fetch, and what its failures are. */
import type { Json } from './answer.js';
import { PenstockError, Unreachable, refusal } from './errors.js';
import { eventsOf, type Event } from './events.js';
import { SILENCE_MS, headersOf, type Request } from './requests.js';

/** A stream's response has started: the job is accepted. Its id is the job's. */
export interface Opened {
  requestId: string;
}

// No connection was made, as undici names it in Node. A browser does not report it.
const UNSENT = new Set(['ECONNREFUSED', 'ENOTFOUND', 'EHOSTUNREACH', 'ENETUNREACH', 'UND_ERR_CONNECT_TIMEOUT']);

export class Caller {
  private readonly headers: Record<string, string>;

  constructor(
    key: string | undefined,
    private readonly timeoutMs: number,
    private readonly fetch: typeof globalThis.fetch,
  ) {
    this.headers = headersOf(key);
  }

  /** Returns the JSON of a whole response, null of an empty one. Throws PenstockError. */
  async call(request: Request, url: string, signal: AbortSignal | undefined, accepted: readonly number[]): Promise<any> {
    const watch = new Watch(signal, this.timeoutMs);
    try {
      const response = await this.send(request, url, 'application/json', watch);
      const content = await response.text();
      if (response.status >= 400 && !accepted.includes(response.status)) {
        throw refusal(response.status, content, response.headers, url);
      }
      return content ? parsed(content, url) : null;
    } catch (error) {
      throw reached(error, url, watch);
    } finally {
      watch.end();
    }
  }

  /**
   * Yields that the response begins, then its events; where it can have none, one that is the end.
   * Throws PenstockError.
   */
  async *connect(request: Request, url: string, signal?: AbortSignal): AsyncGenerator<Opened | Event, void> {
    const watch = new Watch(signal, SILENCE_MS);
    try {
      const response = await this.send(request, url, 'text/event-stream', watch);
      if (response.status >= 400) {
        throw refusal(response.status, await response.text(), response.headers, url);
      }
      if (response.status === 204 || !response.body) {
        yield { id: '', name: '', data: null };
        return;
      }
      yield { requestId: response.headers.get('x-request-id') ?? '' };
      yield* eventsOf(pieces(response.body, watch), url);
    } catch (error) {
      throw reached(error, url, watch);
    } finally {
      watch.end();
    }
  }

  private send(request: Request, url: string, accept: string, watch: Watch): Promise<Response> {
    const given = Object.entries(request.query ?? {}).filter(([, value]) => value != null);
    const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
    const headers: Record<string, string> = { accept, ...this.headers, ...request.headers };
    if (request.body !== undefined) headers['content-type'] = 'application/json';
    return this.fetch(`${url}${request.path}${query && '?'}${query}`, {
      method: request.method,
      headers,
      body: request.body === undefined ? null : JSON.stringify(request.body),
      signal: watch.signal,
      cache: 'no-store',
    });
  }
}

/** Ends a response that is silent for too long, and one that its caller leaves. */
class Watch {
  private readonly controller = new AbortController();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly leave = () => this.controller.abort(this.left?.reason);

  constructor(readonly left: AbortSignal | undefined, private readonly silenceMs: number) {
    if (left?.aborted) this.leave();
    left?.addEventListener('abort', this.leave, { once: true });
    this.heard();
  }

  get signal(): AbortSignal {
    return this.controller.signal;
  }

  /** Notes that something came. */
  heard(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.controller.abort(new Error('it is silent')), this.silenceMs);
  }

  /** Ends the connection, if it is still there. */
  end(): void {
    clearTimeout(this.timer);
    this.left?.removeEventListener('abort', this.leave);
    this.controller.abort();
  }
}

/** Yields the pieces of a body. Not every browser's body is an async iterable. */
async function* pieces(body: ReadableStream<Uint8Array>, watch: Watch): AsyncGenerator<Uint8Array, void> {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      watch.heard();
      yield value;
    }
  } finally {
    reader.releaseLock();
  }
}

/** Returns the client's error of a failure of fetch. */
function reached(error: unknown, url: string, watch: Watch): unknown {
  if (error instanceof PenstockError) return error;
  if (watch.left?.aborted) return watch.left.reason;
  const cause: Json = (error as Json)?.cause ?? {};
  const reason = cause.message || cause.code || (error as Json)?.message || String(error);
  return new Unreachable(`no service answers at ${url} (${reason}).`, { cause: error, isUnsent: UNSENT.has(cause.code) });
}

function parsed(content: string, url: string): any {
  try {
    return JSON.parse(content);
  } catch {
    throw new PenstockError(`${url} is not a Penstock frontend: it did not return JSON.`);
  }
}

/** Waits. Rejects with the signal's reason if it is aborted. */
export function pause(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const leave = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', leave);
      resolve();
    }, ms);
    if (signal?.aborted) leave();
    signal?.addEventListener('abort', leave, { once: true });
  });
}
