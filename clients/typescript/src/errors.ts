/*
 * Errors of the client. The text of an error is the service's own sentence.
 *
 * PenstockError
 * ├── Unreachable         nothing answers, or what answered ended the connection
 * ├── Refused             an error response: status, code, param
 * │   ├── InvalidRequest  the request is wrong: 400 and others
 * │   ├── NotPermitted    no key, or not with this key: 401, 403
 * │   ├── NotFound        no such job, model, file: 404
 * │   ├── Gone            the job has ended, and it or its text has expired: 410
 * │   └── Overloaded      too much, or not now: 429, 503
 * ├── JobFailed           the job ended with an error: code, jobId
 * │   ├── JobCancelled    it was cancelled, or no reader was left
 * │   └── JobExpired      its deadline or its queue timeout passed
 * └── StreamLost          the stream cannot be resumed reliably
 */
import type { Json } from './answer.js';

// Status codes without `x-should-retry` for which a retry may succeed.
const PASSING = new Set([408, 429, 500, 502, 503, 504]);
const CANCELLED = new Set(['cancelled', 'disconnected', 'orphaned']);
const EXPIRED = new Set(['deadline_exceeded', 'queue_timeout']);

export interface Details {
  code?: string | null | undefined;
  jobId?: string;
  mayPass?: boolean;
  cause?: unknown;
}

/** `mayPass`: the same request may succeed later; the client tries it again by itself. */
export class PenstockError extends Error {
  code: string | null;
  jobId: string;
  mayPass: boolean;
  retryAfterMs: number | null = null;

  constructor(message: string, details: Details = {}) {
    super(message, { cause: details.cause });
    this.name = new.target.name;
    this.code = details.code ?? null;
    this.jobId = details.jobId ?? '';
    this.mayPass = details.mayPass ?? false;
  }
}

/**
 * Nothing answers, or the connection was lost. A job that was accepted continues.
 * `isUnsent`: there was no connection, so the service has nothing of the request.
 */
export class Unreachable extends PenstockError {
  isUnsent: boolean;

  constructor(message: string, details: Details & { isUnsent?: boolean } = {}) {
    super(message, { ...details, mayPass: true });
    this.isUnsent = details.isUnsent ?? false;
  }
}

/** An error response. `kind` is its `type`, `param` names the parameter at fault. */
export class Refused extends PenstockError {
  status: number;
  kind: string | null;
  param: string | null;
  requestId: string | null;

  constructor(message: string, status: number, error: Json, headers: Headers) {
    const shouldRetry = headers.get('x-should-retry');
    const mayPass = shouldRetry === null ? PASSING.has(status) : shouldRetry === 'true';
    super(message, { code: error.code, mayPass });
    this.status = status;
    this.kind = error.type ?? null;
    this.param = error.param ?? null;
    this.requestId = headers.get('x-request-id');
    const seconds = Number(headers.get('retry-after') ?? NaN); // the service sends no dates
    this.retryAfterMs = Number.isFinite(seconds) ? seconds * 1000 : null;
  }
}

/** The request cannot be served as it is. */
export class InvalidRequest extends Refused {}

/** The service asks for a key, or the key does not permit this. */
export class NotPermitted extends Refused {}

/** There is no such job, model or file, or it belongs to another tenant. */
export class NotFound extends Refused {}

/**
 * The job has ended, and its record or its text is no longer stored; `code` is `job_expired`. The
 * message has the time, and which setting keeps it longer.
 */
export class Gone extends Refused {}

/** A limit was reached, or the service cannot accept requests now. */
export class Overloaded extends Refused {}

/** The job ended, and not with a whole answer. */
export class JobFailed extends PenstockError {}

/** It was cancelled, or had no reader for too long. */
export class JobCancelled extends JobFailed {}

/** It did not end, or did not begin, in its time. */
export class JobExpired extends JobFailed {}

/** The job, or what its log had, is gone: nothing can be read that surely continues. */
export class StreamLost extends PenstockError {}

/** Returns the error of an error response. */
export function refusal(status: number, content: string, headers: Headers, url: string): Refused {
  let error: Json = {};
  let message = `${url} answered with status ${status}.`;
  try {
    const given = JSON.parse(content).error;
    if (typeof given.message === 'string') {
      error = given;
      message = given.message;
    }
  } catch {
    // no JSON of ours: a proxy's page
  }
  const Kind =
    status === 401 || status === 403 ? NotPermitted
    : status === 404 ? NotFound
    : status === 410 ? Gone
    : status === 429 || status === 503 ? Overloaded
    : status < 500 ? InvalidRequest
    : Refused;
  return new Kind(message, status, error, headers);
}

/** Returns the error of a job that ended otherwise than with its answer. */
export function jobFailure(message: string, code: string | null | undefined, jobId: string, mayPass = false): JobFailed {
  const Kind = CANCELLED.has(code ?? '') ? JobCancelled : EXPIRED.has(code ?? '') ? JobExpired : JobFailed;
  return new Kind(message, { code, jobId, mayPass });
}

/** Returns the error of a stream that lacks the rest of its text: it has expired, or is lost. */
export function streamLoss(message: string, code: string, jobId: string): PenstockError {
  if (code !== 'job_expired') return new StreamLost(message, { code, jobId });
  const gone = new Gone(message, 410, { code }, new Headers());
  gone.jobId = jobId;
  return gone;
}
