import type { Json, Recovery } from './answer.js';
import { PenstockError } from './errors.js';
import type { Event } from './events.js';
import { Caller, pause, type Opened } from './http.js';
import { BackgroundReading, LogReading, SubmittedReading } from './reading.js';
import {
  Places,
  Tries,
  background,
  firstModel,
  idempotent,
  inPath,
  limited,
  mayRepeat,
  turnsOf,
  type Request,
} from './requests.js';
import { Stream } from './stream.js';

const RECOVERY = 'recovery'; // the name of the events that onRecovery takes

export interface ClientOptions {
  /** An API key, where the service asks for one. Without it that of PENSTOCK_KEY. */
  key?: string;
  /**
   * Milliseconds without a success after which requests and streams fail, when each URL was tried;
   * with 0 each is tried once. Default: 60,000.
   */
  patienceMs?: number;
  /** Milliseconds for a response that is no stream. Default: 60,000. */
  timeoutMs?: number;
  /** Another `fetch`, such as one with other certificates. */
  fetch?: typeof globalThis.fetch;
  /** Called while a stream is read: its job has lost its worker, or another one has resumed it. */
  onRecovery?: (recovery: Recovery) => void;
}

/** The parameters of a route, under the service's names, such as `max_tokens`. */
export interface Parameters {
  /** Without it: the first that is served. */
  model?: string | undefined;
  /** The limit of output tokens, in every method. */
  max_tokens?: number | undefined;
  temperature?: number | undefined;
  [name: string]: unknown;
}

export interface Leaving {
  /** Its abort ends the request; a job that the stream submitted is cancelled. */
  signal?: AbortSignal | undefined;
}

export interface Submitting extends Leaving {
  /** The same request with the same key is the same answer. */
  idempotencyKey?: string | undefined;
}

export interface Following extends Leaving {
  /** The text as the model wrote it, its reasoning and calls in it. */
  raw?: boolean;
  /** The id of the event after which a raw stream starts. */
  after?: string;
}

export interface Calling extends Leaving {
  body?: unknown;
  query?: Record<string, string | number | null | undefined>;
  /** Makes a POST repeatable. */
  idempotencyKey?: string;
  /** Error statuses whose JSON is returned. */
  accepted?: readonly number[];
  /** By default the client's. */
  patienceMs?: number;
}

/** A running service, for programs in Node and pages in browsers. */
export class Client {
  private readonly places: Places;
  private readonly patienceMs: number;
  private readonly caller: Caller;
  private readonly onRecovery: ClientOptions['onRecovery'];

  /**
   * Takes the URLs of one or several frontends: another one is asked when one is away. Without them
   * PENSTOCK_URL has them. Throws TypeError for an invalid URL.
   */
  constructor(urls?: string | readonly string[], options: ClientOptions = {}) {
    this.places = new Places(urls);
    this.patienceMs = options.patienceMs ?? 60_000;
    // A browser's fetch must be called on its window.
    const fetch = options.fetch ?? ((input, init) => globalThis.fetch(input, init));
    this.caller = new Caller(options.key, options.timeoutMs ?? 60_000, fetch);
    this.onRecovery = options.onRecovery;
  }

  /** The frontend that is asked next. */
  get url(): string {
    return this.places.url;
  }

  // Answers.

  /**
   * Returns the stream of a chat completion: of messages, or of one question. `parameters` are
   * those of `/v1/chat/completions`.
   */
  chat(messages: string | readonly Json[], parameters: Parameters = {}, options: Submitting = {}): Stream {
    const body = { stream_options: { include_usage: true }, ...parameters, messages: turnsOf(messages) };
    return this.submitted('/v1/chat/completions', body, options);
  }

  /** Returns the stream of a completion; `parameters` are those of `/v1/completions`. */
  complete(prompt: unknown, parameters: Parameters = {}, options: Submitting = {}): Stream {
    const body = { stream_options: { include_usage: true }, ...parameters, prompt };
    return this.submitted('/v1/completions', body, options);
  }

  /** Returns the stream of the native API, whose deltas have `tokenIds`. */
  generate(prompt: unknown, parameters: Parameters = {}, options: Submitting = {}): Stream {
    return this.submitted('/generate', { ...parameters, prompt }, options);
  }

  private submitted(path: string, body: Json, options: Submitting): Stream {
    return new Stream(this, new SubmittedReading(path, limited(path, body), options.idempotencyKey), options.signal);
  }

  // Jobs in the background.

  /**
   * Submits a job that belongs to no connection; returns its id at once. `input` and `parameters`
   * are those of `/v1/responses`, with `max_tokens` for `max_output_tokens`. Throws PenstockError.
   */
  async submit(input: unknown, parameters: Parameters = {}, options: Submitting = {}): Promise<string> {
    const { signal, idempotencyKey } = options;
    const body = background(input, parameters.model ?? (await this.model({ signal })), parameters);
    const request = { method: 'POST', path: '/v1/responses', body, headers: idempotent(idempotencyKey) };
    return String((await this.send(request, { signal })).id);
  }

  /**
   * Returns the stream of a submitted job, from its start. Leaving it does not
   * cancel the job. Jobs that `submit` did not make are always `raw`.
   */
  follow(jobId: string, { raw = false, after = '', signal }: Following = {}): Stream {
    const isRaw = raw || after || !jobId.startsWith('resp_');
    return new Stream(this, isRaw ? new LogReading(jobId, after) : new BackgroundReading(jobId), signal);
  }

  /** Returns a job's state, place in the queue, times, tokens, worker. Throws NotFound. */
  job(jobId: string, options: Leaving = {}): Promise<Json> {
    return this.call('GET', `/v1/jobs/${inPath(jobId)}`, options);
  }

  /** Returns jobs, newest first. Throws PenstockError. */
  async jobs({ state, limit = 20, ...options }: { state?: string; limit?: number } & Leaving = {}): Promise<Json[]> {
    return (await this.call('GET', '/v1/jobs', { ...options, query: { state, limit } })).data;
  }

  /** Cancels a job in any state; returns it as it ended. Idempotent. Throws NotFound. */
  cancel(jobId: string, options: Leaving = {}): Promise<Json> {
    return this.call('DELETE', `/v1/jobs/${inPath(jobId)}`, options);
  }

  // Everything else.

  /** Returns the first model with a live worker, else the first one. Throws PenstockError. */
  async model(options: Leaving = {}): Promise<string> {
    return firstModel((await this.call('GET', '/v1/models', options)).data);
  }

  /**
   * Returns the JSON of a response, of a status in `accepted` too. Throws PenstockError.
   *
   * It is tried again for `patienceMs`, and at each URL once. A POST that was sent is sent again
   * only with an `idempotencyKey`.
   */
  call(method: string, path: string, options: Calling = {}): Promise<any> {
    const { body, query, idempotencyKey } = options;
    const headers = idempotencyKey ? idempotent(idempotencyKey) : {};
    return this.send({ method, path, body, query, headers }, options);
  }

  private async send(request: Request, { signal, accepted = [], patienceMs }: Calling): Promise<any> {
    const tries = this.tries(patienceMs);
    for (;;) {
      try {
        return await this.caller.call(request, tries.url, signal, accepted);
      } catch (error) {
        if (!(error instanceof PenstockError)) throw error;
        await pause(tries.failed(error, mayRepeat(request, error)), signal);
      }
    }
  }

  /** @internal */
  async *connect(request: Request, url: string, signal?: AbortSignal): AsyncGenerator<Opened | Event, void> {
    const { onRecovery } = this;
    const headers = onRecovery ? { ...request.headers, 'penstock-events': RECOVERY } : request.headers ?? {};
    for await (const event of this.caller.connect({ ...request, headers }, url, signal)) {
      // Not within the caller: an error of the function is no lost connection.
      if (onRecovery && 'name' in event && event.name === RECOVERY) onRecovery(event.data as Recovery);
      else yield event;
    }
  }

  /** @internal */
  tries(patienceMs = this.patienceMs): Tries {
    return new Tries(this.places, patienceMs);
  }
}
