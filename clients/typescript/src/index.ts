/*
 * A client of a running service, whose streams resume by themselves after a failure.
 *
 *     import { Client } from 'penstock';
 *
 *     const client = new Client('http://127.0.0.1:8000');
 *     for await (const delta of client.chat('What is a penstock?')) process.stdout.write(delta.text);
 */
export type { Answer, Choice, Delta, Json, Recovery } from './answer.js';
export { Client, type Calling, type ClientOptions, type Following, type Leaving, type Parameters, type Submitting } from './client.js';
export {
  Gone,
  InvalidRequest,
  JobCancelled,
  JobExpired,
  JobFailed,
  NotFound,
  NotPermitted,
  Overloaded,
  PenstockError,
  Refused,
  StreamLost,
  Unreachable,
} from './errors.js';
export { Stream } from './stream.js';
