/* The client's requests, retries and URLs: without a network. */
import type { Json } from './answer.js';
import { PenstockError, Unreachable } from './errors.js';

const DEFAULT_URL = 'http://127.0.0.1:8000';
// A stream sends a keep-alive every 15 s at the latest: a longer silence is a dead connection.
export const SILENCE_MS = 45_000;
export const LEAVING_MS = 5_000; // for the cancel of a job whose stream is left
const FIRST_PAUSE_MS = 250;
const MAX_PAUSE_MS = 5_000;
const IDEMPOTENCY_KEY = 'idempotency-key';
// By path the names of the limit of output tokens, its first one in each; elsewhere `max_tokens`.
const LIMITS: Record<string, string[]> = {
  '/v1/chat/completions': ['max_tokens', 'max_completion_tokens'],
  '/v1/responses': ['max_output_tokens'],
};
const LIMIT_NAMES = ['max_tokens', 'max_completion_tokens', 'max_output_tokens'];

/** One HTTP request, for any of the URLs. */
export interface Request {
  method: string;
  path: string;
  body?: unknown;
  query?: Record<string, string | number | null | undefined> | undefined;
  headers?: Record<string, string>;
}

/** Returns whether a request can be sent again after `error`, and is served once all the same. */
export function mayRepeat(request: Request, error: PenstockError): boolean {
  const isUnsent = error instanceof Unreachable && error.isUnsent;
  const isRepeatable = request.method !== 'POST' || IDEMPOTENCY_KEY in (request.headers ?? {});
  return error.mayPass && (isRepeatable || isUnsent);
}

/** The frontends' URLs, and which of them is asked next. */
export class Places {
  readonly urls: string[];
  private turn = 0;

  /** Takes one URL, several, or those of PENSTOCK_URL, separated by commas. Throws TypeError. */
  constructor(urls?: string | readonly string[]) {
    const given = urls ?? (environment('PENSTOCK_URL') || DEFAULT_URL);
    this.urls = (typeof given === 'string' ? given.split(',') : [...given]).map((url) => baseUrl(url.trim()));
    if (!this.urls.length) throw new TypeError('at least one URL of a frontend is needed');
  }

  get url(): string {
    return this.urls[this.turn % this.urls.length] ?? DEFAULT_URL;
  }

  /** Asks the next one from now on, where `url` is the one that is asked now. */
  leave(url: string): void {
    if (url === this.url) this.turn += 1;
  }
}

/**
 * The tries of one request: which URL, how long a pause, and when to give up.
 *
 * `succeeded` after each success; a connection that was `opened` and lasted is one, too. `failed`
 * throws the error that it is given where another try is of no use, or where each URL was tried
 * since the last success and that was `limitMs` ago.
 */
export class Tries {
  url: string;
  private numFailed = 0;
  private since: number | null = null;
  private openedAt: number | null = null;

  constructor(private places: Places, private limitMs: number) {
    this.url = places.url;
  }

  succeeded(): void {
    this.numFailed = 0;
    this.since = null;
    this.openedAt = null;
  }

  /** Records that a response started, whose first event may take long. */
  opened(): void {
    this.openedAt = performance.now();
  }

  /** Returns the milliseconds to wait before the next try. */
  failed(error: PenstockError, mayPass: boolean): number {
    const now = performance.now();
    if (this.openedAt !== null && now - this.openedAt >= MAX_PAUSE_MS) this.succeeded();
    this.openedAt = null;
    this.since ??= now;
    const left = Math.max(0, this.since + this.limitMs - now);
    this.numFailed += 1;
    const rounds = Math.floor(this.numFailed / this.places.urls.length);
    if (!mayPass || (left === 0 && rounds > 0)) throw error;
    this.places.leave(this.url);
    this.url = this.places.url;
    // No pause until each URL has failed once.
    let pause = rounds ? Math.min(FIRST_PAUSE_MS * 2 ** (Math.min(rounds, 10) - 1), MAX_PAUSE_MS) : 0;
    pause *= 0.75 + Math.random() / 4;
    if (error.retryAfterMs !== null && error.code !== 'frontend_draining') {
      pause = Math.max(pause, error.retryAfterMs);
    }
    return Math.min(pause, left);
  }
}

/** Returns the header of an idempotency key, by default a new one. */
export function idempotent(key: string = newKey()): Record<string, string> {
  return { [IDEMPOTENCY_KEY]: key };
}

/** Returns a name as one segment of a path. Throws TypeError for an empty one. */
export function inPath(name: string): string {
  if (!name.trim()) throw new TypeError('the id is empty');
  return encodeURIComponent(name.trim());
}

/** Returns the headers of all requests; without a `key` with that of PENSTOCK_KEY, if any. */
export function headersOf(key: string | undefined): Record<string, string> {
  const given = key ?? environment('PENSTOCK_KEY');
  return given ? { authorization: `Bearer ${given}` } : {};
}

/** Returns the first model with a live worker, else the first one. Throws PenstockError. */
export function firstModel(models: readonly Json[]): string {
  const model = models.find((one) => one.is_served ?? true) ?? models[0];
  if (!model) {
    throw new PenstockError('the service has no model yet: no worker has announced one.', { mayPass: true });
  }
  return String(model.id);
}

/**
 * Returns parameters whose limit of output tokens, under any API's name, has the path's name. A
 * second limit stays as it is: the service refuses it.
 */
export function limited(path: string, parameters: Json): Json {
  const own = LIMITS[path] ?? ['max_tokens'];
  const given = LIMIT_NAMES.find((name) => name in parameters);
  if (own.some((name) => name in parameters) || !given) return { ...parameters };
  return Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name === given ? own[0] : name, value]));
}

/** Returns the body of a response in the background. */
export function background(input: unknown, model: string, parameters: Json): Json {
  return { ...limited('/v1/responses', parameters), model, input, background: true, stream: false };
}

/** Returns the messages of a conversation; of one question the user's. */
export function turnsOf(messages: string | readonly Json[]): Json[] {
  return typeof messages === 'string' ? [{ role: 'user', content: messages }] : [...messages];
}

// crypto.randomUUID is missing on pages that did not come over HTTPS.
function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}

function baseUrl(url: string): string {
  const whole = url.includes('://') ? url : `http://${url}`;
  let parts: URL;
  try {
    parts = new URL(whole);
  } catch {
    throw noUrl(url);
  }
  if (!/^https?:$/.test(parts.protocol) || !parts.hostname) throw noUrl(url);
  return `${parts.origin}${parts.pathname.replace(/\/+$/, '')}`.replace(/\/v1$/, '');
}

function noUrl(url: string): TypeError {
  return new TypeError(`"${url}" is no http:// or https:// URL of a frontend.`);
}

/** Returns a variable of the environment, where there is one. */
function environment(name: string): string | undefined {
  const process: { env?: Record<string, string | undefined> } | undefined = (globalThis as Json).process;
  return process?.env?.[name];
}
