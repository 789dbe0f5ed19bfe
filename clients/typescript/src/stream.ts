import type { Answer, Delta } from './answer.js';
import type { Client } from './client.js';
import { PenstockError, StreamLost } from './errors.js';
import { pause } from './http.js';
import type { Reading } from './reading.js';
import { LEAVING_MS, inPath } from './requests.js';

const LEFT = Symbol('left');

/**
 * An answer as it is generated: an async iterable of its deltas.
 *
 * A connection that is lost, a frontend or a worker that dies, are passed over: each token comes
 * once, in order. Leaving it before its end (`break`, `close`, its signal's abort) cancels the job
 * that it submitted. To be read once.
 */
export class Stream implements AsyncIterableIterator<Delta> {
  private readonly leaving = new AbortController();
  private readonly deltas: AsyncGenerator<Delta, void>;

  constructor(client: Client, private readonly reading: Reading, signal?: AbortSignal) {
    const signals = signal ? either(signal, this.leaving) : this.leaving.signal;
    this.deltas = read(client, reading, signals);
  }

  /** The id of the job, "" before the service has named it. */
  get jobId(): string {
    return this.reading.jobId;
  }

  /** The answer read so far. */
  get answer(): Answer {
    return this.reading.answer;
  }

  /** Reads to the end; returns the whole answer. Throws PenstockError. */
  async result(): Promise<Answer> {
    for await (const _ of this) {
      // each delta is in the answer
    }
    return this.answer;
  }

  /** Ends the connection, and cancels the job where this stream submitted it. Idempotent. */
  async close(): Promise<void> {
    this.leaving.abort(LEFT);
    await this.deltas.return();
  }

  async next(): Promise<IteratorResult<Delta, void>> {
    try {
      const result = await this.deltas.next();
      if (result.done) this.leaving.abort(LEFT); // nothing listens to the caller's signal any more
      return result;
    } catch (error) {
      if (error === LEFT) return { done: true, value: undefined };
      throw error;
    }
  }

  async return(): Promise<IteratorResult<Delta, void>> {
    await this.close();
    return { done: true, value: undefined };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}

/** Returns the signal of a controller that a given signal aborts, too. */
function either(signal: AbortSignal, controller: AbortController): AbortSignal {
  const follow = () => controller.abort(signal.reason);
  if (signal.aborted) follow();
  else signal.addEventListener('abort', follow, { once: true, signal: controller.signal });
  return controller.signal;
}

async function* read(client: Client, reading: Reading, signal: AbortSignal): AsyncGenerator<Delta, void> {
  let isLeft = true; // the reader goes before the end
  try {
    if (reading.needsModel) reading.choose(await client.model({ signal }));
    const tries = client.tries();
    while (!reading.isOver) {
      try {
        for await (const event of client.connect(reading.request(), tries.url, signal)) {
          if ('requestId' in event) {
            tries.opened();
            reading.opened(event.requestId);
            continue;
          }
          if (reading.isOver) continue; // to its end, so that the connection can be used again
          const deltas = reading.take(event);
          tries.succeeded();
          yield* deltas;
        }
        if (!reading.isOver) throw reading.endedEarly();
      } catch (error) {
        if (!(error instanceof PenstockError)) throw error;
        if (!reading.isOver) {
          if (error instanceof StreamLost) await cancel(client, reading); // the job that the repeat began
          await pause(tries.failed(error, reading.mayPass(error)), signal);
        }
      }
    }
    isLeft = false;
  } catch (error) {
    if (error instanceof PenstockError) {
      isLeft = false;
      error.jobId ||= reading.jobId;
    }
    throw error;
  } finally {
    if (isLeft) await cancel(client, reading);
  }
  if (reading.failure) throw reading.failure;
}

async function cancel(client: Client, reading: Reading): Promise<void> {
  if (!reading.cancels || !reading.jobId || reading.isOver) return;
  try {
    await client.call('DELETE', `/v1/jobs/${inPath(reading.jobId)}`, { patienceMs: LEAVING_MS });
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error; // else its deadline ends it
  }
}
