/*
 * Reads an answer: the request of each connection, and the deltas of each event. No network.
 *
 * A submitted answer is requested again with its idempotency key: the service repeats it from its
 * start, and the delivered part is left out. An answer in the background resumes after the
 * number, a job's log after the id, of the last event read.
 */
import { answerOf, emptyDelta, type Answer, type Delta, type Json } from './answer.js';
import { NotFound, PenstockError, StreamLost, Unreachable, jobFailure, streamLoss } from './errors.js';
import type { Event } from './events.js';
import { KeptChoice, isEmpty, sorted } from './kept.js';
import { idempotent, inPath, type Request } from './requests.js';

// The job is lost before any of it was delivered: the same request starts it again.
const BEGINS_ANEW = new Set(['worker_lost', 'engine_died', 'payload_lost', 'job_lost', 'model_replaced']);
const LOST = new Set(['job_lost', 'job_expired', 'stream_diverged']);
const PASSING_KINDS = new Set(['service_unavailable', 'overloaded_error', 'rate_limit_error']);
const ENDS = new Set(['response.completed', 'response.incomplete', 'response.failed', 'response.cancelled']);

/**
 * One answer, over as many connections as it takes.
 *
 * `isOver` after its last event; `failure` is then the error that it ended with. `cancels`:
 * leaving it early cancels its job. `needsModel`: `choose` has to be called first.
 */
export abstract class Reading {
  readonly cancels: boolean = false;
  needsModel = false;
  isOver = false;
  hasBegun = false;
  failure: PenstockError | null = null;

  constructor(public jobId = '') {}

  /** Returns the request of the next connection. */
  abstract request(): Request;

  /** Returns the deltas of an event. Throws PenstockError if the stream ends early. */
  abstract take(event: Event): Delta[];

  /** The answer read so far. */
  abstract get answer(): Answer;

  /** Names the model that serves it. */
  choose(_model: string): void {
    throw new Error('this answer has a model');
  }

  /** Records the request id once the stream is open, for readers that stop before its first event. */
  opened(requestId: string): void {
    this.jobId ||= requestId;
  }

  /**
   * Returns whether another connection may continue after `error`. A known job may be missing for a
   * while: at a frontend that has just started, after a loss of Redis.
   */
  mayPass(error: PenstockError): boolean {
    return error.mayPass || (this.hasBegun && error instanceof NotFound);
  }

  /** Returns the error of a connection that ended before the answer did. */
  endedEarly(): Unreachable {
    return new Unreachable('the stream ended before the answer did.', { jobId: this.jobId });
  }

  protected fail(failure: PenstockError): void {
    this.failure = failure;
    this.isOver = true;
  }
}

/** An answer that its own request submits, in one of three dialects. */
export class SubmittedReading extends Reading {
  override readonly cancels = true;
  private readonly body: Json;
  private readonly headers: Record<string, string>;
  private readonly choices = new Map<number, KeptChoice>();
  private isRepeat = false;
  private model: string;
  private usage: Json = {};
  private metrics: Json | null = null;

  constructor(private path: string, body: Json, key?: string) {
    super();
    this.body = { on_disconnect: 'continue', ...body, stream: true };
    this.headers = idempotent(key);
    this.model = String(body.model ?? '');
    this.needsModel = !this.model;
  }

  override choose(model: string): void {
    this.body.model = model;
    this.needsModel = false;
  }

  request(): Request {
    this.isRepeat = this.hasBegun;
    for (const choice of this.choices.values()) choice.repeat();
    return { method: 'POST', path: this.path, body: this.body, headers: this.headers };
  }

  take({ data }: Event): Delta[] {
    if (data === null) {
      this.isOver = true;
      return [];
    }
    if (data.error) {
      this.takeError(data.error);
      return [emptyDelta(data)];
    }
    this.meet(data);
    this.usage = data.usage ?? this.usage;
    this.metrics = data.metrics ?? this.metrics;
    const deltas = data.choices
      ? data.choices.map((choice: Json) => this.takeChoice(choice, data))
      : [this.choice(0).take(data, generated(data))];
    return deltas.filter((delta: Delta) => !(this.isRepeat && isEmpty(delta)));
  }

  get answer(): Answer {
    const choices = sorted(this.choices).map((choice) => choice.whole);
    return answerOf(this.jobId, this.model, choices, this.usage, this.metrics);
  }

  private get hasDelivered(): boolean {
    return [...this.choices.values()].some((choice) => !choice.isEmpty);
  }

  /** Records the job of the stream. Throws StreamLost if it is another than before. */
  private meet(data: Json): void {
    this.model = String(data.model || this.model);
    const before = this.jobId;
    this.jobId = String(data.id || before);
    this.hasBegun = true;
    if (before && this.jobId !== before && this.hasDelivered) {
      throw new StreamLost(`The job ${before} of this answer is gone, and its text cannot be continued.`, { jobId: before });
    }
  }

  /** Notes how the job ended. Throws Unreachable where only the stream did. */
  private takeError(error: Json): void {
    const { code, type } = error;
    const message = String(error.message);
    const beginsAnew = BEGINS_ANEW.has(code) && !this.hasDelivered;
    if (beginsAnew) throw jobFailure(message, code, this.jobId, true);
    if (LOST.has(code)) this.fail(streamLoss(message, code, this.jobId));
    else if (PASSING_KINDS.has(type) || code === 'internal_error') {
      throw new Unreachable(message, { jobId: this.jobId });
    } else this.fail(jobFailure(message, code, this.jobId));
  }

  private takeChoice(given: Json, data: Json): Delta {
    const delta = given.delta ?? {};
    return this.choice(given.index).take(data, {
      ...generated(given),
      text: given.text || delta.content,
      reasoning: delta.reasoning_content,
      toolCalls: delta.tool_calls ?? [],
      logprobs: given.logprobs,
    });
  }

  private choice(index: number): KeptChoice {
    return choiceOf(this.choices, index);
  }
}

/** A response that `submit` created. */
export class BackgroundReading extends Reading {
  private last: number | null = null;
  private kept = new KeptChoice(0);
  private response: Json = {};

  request(): Request {
    const query = { stream: 'true', starting_after: this.last };
    return { method: 'GET', path: `/v1/responses/${inPath(this.jobId)}`, query };
  }

  take({ data }: Event): Delta[] {
    if (data === null) return [];
    const kind: string = data.type;
    if (kind === 'error') {
      this.takeError(data);
      return [emptyDelta(data)];
    }
    this.hasBegun = true;
    this.last = data.sequence_number ?? this.last;
    this.response = data.response ?? this.response;
    const isEnd = ENDS.has(kind);
    if (isEnd) this.end();
    return [
      this.kept.take(data, {
        text: kind === 'response.output_text.delta' ? data.delta : '',
        reasoning: kind === 'response.reasoning_text.delta' ? data.delta : '',
        finishReason: isEnd ? finishReason(this.response) : null,
      }),
    ];
  }

  get answer(): Answer {
    const read = this.kept.whole;
    const toolCalls = calls(this.response).map((item) => ({
      id: item.call_id,
      type: 'function',
      function: { name: item.name, arguments: item.arguments },
    }));
    return answerOf(this.jobId, String(this.response.model ?? ''), [{ ...read, toolCalls }], this.response.usage ?? {});
  }

  private takeError(data: Json): void {
    const message = String(data.message);
    if (!LOST.has(data.code)) throw new Unreachable(message, { jobId: this.jobId });
    this.fail(streamLoss(message, data.code, this.jobId));
  }

  private end(): void {
    this.isOver = true;
    const { status, error } = this.response;
    if (status === 'completed' || status === 'incomplete') return;
    const code = status === 'cancelled' ? 'cancelled' : error?.type || error?.code;
    this.failure = jobFailure(error?.message || `the answer is ${status}.`, code, this.jobId);
  }
}

/** The log of a job, in any dialect: its text as the model wrote it, calls and reasoning too. */
export class LogReading extends Reading {
  private choices = new Map<number, KeptChoice>();
  private usage: Json = {};

  constructor(jobId: string, private after = '') {
    super(jobId);
  }

  request(): Request {
    const query = { after: this.after || null };
    return { method: 'GET', path: `/v1/jobs/${inPath(this.jobId)}/stream`, query };
  }

  take({ id, data }: Event): Delta[] {
    if (data === null) {
      this.isOver = true;
      return [];
    }
    if (data.error) {
      this.takeError(data.error, id !== '' && id !== this.after);
      return [emptyDelta(data)];
    }
    this.hasBegun = true;
    this.after = id || this.after;
    this.usage = data.usage ?? this.usage;
    if (data.done) this.isOver = true;
    return [choiceOf(this.choices, data.index ?? 0).take(data, generated(data))];
  }

  get answer(): Answer {
    return answerOf(this.jobId, '', sorted(this.choices).map((choice) => choice.whole), this.usage);
  }

  /** Records the error of the job, which has its own id. Throws Unreachable if only the stream failed. */
  private takeError(error: Json, isEnd: boolean): void {
    const { code } = error;
    const message = String(error.message);
    if (isEnd) this.fail(jobFailure(message, code, this.jobId));
    else if (LOST.has(code)) this.fail(streamLoss(message, code, this.jobId));
    else throw new Unreachable(message, { jobId: this.jobId });
  }
}

function choiceOf(choices: Map<number, KeptChoice>, index: number): KeptChoice {
  let choice = choices.get(index);
  if (!choice) choices.set(index, (choice = new KeptChoice(index)));
  return choice;
}

/** Returns the data of an event of the native API, or of a choice in another's. */
function generated(data: Json): Json {
  return { text: data.text, tokenIds: data.token_ids ?? [], finishReason: data.finish_reason, stopReason: data.stop_reason };
}

function calls(response: Json): Json[] {
  return (response.output ?? []).filter((item: Json) => item.type === 'function_call');
}

/** Returns chat's finish reason of a response; null if it failed. */
function finishReason(response: Json): string | null {
  if (response.status === 'completed') return calls(response).length ? 'tool_calls' : 'stop';
  return response.status === 'incomplete' ? 'length' : null;
}
