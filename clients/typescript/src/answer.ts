/** JSON as the service sends it. */
export type Json = Record<string, any>;

/**
 * What one event added to a choice: each token, each character is in one delta.
 *
 * `event` is the service's JSON as it came. After a connection was lost it may repeat what earlier
 * deltas had; the other members never do.
 */
export interface Delta {
  text: string;
  /** Index of the choice. */
  index: number;
  reasoning: string;
  /** Parts, as in OpenAI's chunks. */
  toolCalls: Json[];
  tokenIds: number[];
  logprobs: Json | null;
  /** With the last delta of a choice. */
  finishReason: string | null;
  event: Json;
}

/** One of the answers to a prompt, as far as it was read. */
export interface Choice {
  text: string;
  reasoning: string;
  toolCalls: Json[];
  tokenIds: number[];
  logprobs: Json | null;
  finishReason: string | null;
  stopReason: string | number | null;
}

/** All choices. `text` and `toolCalls` are the first one's; `usage` is empty until the end. */
export interface Answer {
  jobId: string;
  model: string;
  text: string;
  toolCalls: Json[];
  choices: Choice[];
  usage: Json;
  /** Where they were requested. */
  metrics: Json | null;
}

export function answerOf(jobId: string, model: string, choices: Choice[], usage: Json, metrics: Json | null = null): Answer {
  const first = choices[0];
  return { jobId, model, text: first?.text ?? '', toolCalls: first?.toolCalls ?? [], choices, usage, metrics };
}

/** The delta of an event that adds nothing. */
export function emptyDelta(event: Json): Delta {
  return { text: '', index: 0, reasoning: '', toolCalls: [], tokenIds: [], logprobs: null, finishReason: null, event };
}

/**
 * Sent while a stream is read: its job has lost its worker after `tokens`, or another worker has
 * resumed it, `after_s` seconds after something came last; null: the loss was too short to be found.
 */
export type Recovery =
  | { type: 'recovery'; state: 'waiting'; tokens: number; cause: string | null }
  | { type: 'recovery'; state: 'resumed'; tokens: number; worker: string; after_s: number | null };
