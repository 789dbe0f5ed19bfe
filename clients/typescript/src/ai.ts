/*
 * A transport for the AI SDK's `useChat`: a page asks Penstock itself, and its answers resume.
 *
 *     const transport = new PenstockChatTransport(new Client(urls));
 *     const chat = useChat({ id, transport, resume: true });
 *
 * Each answer is a job in the background. It belongs to no connection: a reload, another frontend,
 * a killed worker resume the same answer. The AI SDK is not imported: its shapes are written
 * here as far as they are used.
 */
import type { Json } from './answer.js';
import type { Client, Parameters } from './client.js';
import { JobCancelled, NotFound, PenstockError, Unreachable } from './errors.js';
import type { Stream } from './stream.js';

/** A UIMessage of the AI SDK. */
export interface ChatMessage {
  role: string;
  parts: readonly { type: string }[];
}

/** The UIMessageChunks that answers are made of. */
export type Chunk =
  | { type: 'start'; messageId: string }
  | { type: 'start-step' }
  | { type: 'text-start' | 'text-end' | 'reasoning-start' | 'reasoning-end'; id: string }
  | { type: 'text-delta' | 'reasoning-delta'; id: string; delta: string }
  | { type: 'tool-input-available'; toolCallId: string; toolName: string; input: unknown }
  | { type: 'tool-input-error'; toolCallId: string; toolName: string; input: unknown; errorText: string }
  | { type: 'finish-step' }
  | { type: 'finish'; finishReason: 'stop' | 'length' | 'tool-calls' | 'other' }
  | { type: 'abort' }
  | { type: 'error'; errorText: string };

/** Where the job of a chat's unfinished answer is kept. `localStorage` is one. */
export interface JobStorage {
  getItem(key: string): string | null | Promise<string | null>;
  setItem(key: string, jobId: string): void | Promise<void>;
  removeItem(key: string): void | Promise<void>;
}

export interface TransportOptions {
  /** By default the page's localStorage; in Node the memory. */
  storage?: JobStorage;
  /** Parameters of each request, such as `instructions`, `max_tokens`, `tools`; a request's `body` has more. */
  parameters?: Parameters;
}

interface Sending {
  chatId: string;
  messages: readonly ChatMessage[];
  abortSignal?: AbortSignal | undefined;
  body?: object | undefined;
}

interface Reconnecting {
  chatId: string;
  abortSignal?: AbortSignal | undefined;
}

/** A ChatTransport of the AI SDK (6 and later). `stop()` cancels the answer's job. */
export class PenstockChatTransport {
  /** An answer that is resumed comes from its begin. */
  readonly resumeStreamIsReplay = true;
  private readonly storage: JobStorage;
  private readonly parameters: Parameters;

  constructor(private readonly client: Client, { storage, parameters }: TransportOptions = {}) {
    this.storage = storage ?? defaultStorage();
    this.parameters = parameters ?? {};
  }

  async sendMessages({ chatId, messages, abortSignal, body }: Sending): Promise<ReadableStream<Chunk>> {
    const parameters = { ...this.parameters, ...body };
    // Not ended by the signal: a job whose id is unknown could not be cancelled.
    const jobId = await this.client.submit(inputOf(messages), parameters);
    await this.storage.setItem(keyOf(chatId), jobId);
    return this.chunks(chatId, jobId, abortSignal);
  }

  /** Returns a chat's unfinished answer, or null. */
  async reconnectToStream({ chatId, abortSignal }: Reconnecting): Promise<ReadableStream<Chunk> | null> {
    const jobId = await this.storage.getItem(keyOf(chatId));
    if (!jobId) return null;
    try {
      await this.client.job(jobId, { signal: abortSignal });
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
      await this.storage.removeItem(keyOf(chatId)); // its text has expired
      return null;
    }
    return this.chunks(chatId, jobId, abortSignal);
  }

  private chunks(chatId: string, jobId: string, signal: AbortSignal | undefined): ReadableStream<Chunk> {
    const stream = this.client.follow(jobId, { signal });
    const chunks = chunksOf(jobId, stream);
    return new ReadableStream<Chunk>({
      pull: async (controller) => {
        try {
          const { done, value } = await chunks.next();
          if (!done) {
            controller.enqueue(value);
            return;
          }
          if (value.isOver) await this.storage.removeItem(keyOf(chatId));
          controller.close();
        } catch (error) {
          if (signal?.aborted) {
            await this.client.cancel(jobId);
            await this.storage.removeItem(keyOf(chatId));
          }
          throw error;
        }
      },
      cancel: () => stream.close(), // the reader may resume later
    });
  }
}

/** Yields an answer as chunks; how its job failed is one of them. Returns whether it is over for good. */
async function* chunksOf(jobId: string, stream: Stream): AsyncGenerator<Chunk, { isOver: boolean }> {
  yield { type: 'start', messageId: jobId };
  yield { type: 'start-step' };
  let open: 'text' | 'reasoning' | null = null;
  let id = '';
  let numParts = 0;
  try {
    for await (const delta of stream) {
      for (const kind of ['reasoning', 'text'] as const) {
        if (!delta[kind]) continue;
        if (open !== kind) {
          if (open) yield { type: `${open}-end`, id };
          open = kind;
          id = `${jobId}-${numParts++}`;
          yield { type: `${kind}-start`, id };
        }
        yield { type: `${kind}-delta`, id, delta: delta[kind] };
      }
    }
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    yield error instanceof JobCancelled ? { type: 'abort' } : { type: 'error', errorText: error.message };
    return { isOver: !(error instanceof Unreachable) };
  }
  if (open) yield { type: `${open}-end`, id };
  yield* stream.answer.toolCalls.map(callChunk);
  yield { type: 'finish-step' };
  yield { type: 'finish', finishReason: finishReason(stream.answer.choices[0]?.finishReason) };
  return { isOver: true };
}

function callChunk(call: Json): Chunk {
  const named = { toolCallId: String(call.id), toolName: String(call.function.name) };
  const input: string = call.function.arguments;
  try {
    return { type: 'tool-input-available', ...named, input: JSON.parse(input || '{}') };
  } catch {
    return { type: 'tool-input-error', ...named, input, errorText: 'The arguments of this call are no whole JSON.' };
  }
}

function finishReason(given: string | null | undefined): 'stop' | 'length' | 'tool-calls' | 'other' {
  if (given === 'stop' || given === 'length') return given;
  return given === 'tool_calls' ? 'tool-calls' : 'other';
}

/** Returns a conversation as the input items of `/v1/responses`. */
export function inputOf(messages: readonly ChatMessage[]): Json[] {
  return messages.flatMap(({ role, parts }) => {
    const given = parts as readonly Json[];
    return role === 'assistant' ? given.flatMap(itemsOf) : [{ role, content: given.flatMap(contentOf) }];
  });
}

function contentOf(part: Json): Json[] {
  if (part.type === 'text') return [{ type: 'input_text', text: part.text }];
  if (part.type !== 'file') return []; // data parts are the page's own
  const isImage = String(part.mediaType).startsWith('image/');
  return [isImage ? { type: 'input_image', image_url: part.url } : { type: 'input_file', file_url: part.url }];
}

function itemsOf(part: Json): Json[] {
  if (part.type === 'text') return part.text ? [{ role: 'assistant', content: part.text }] : [];
  const isTool = part.type === 'dynamic-tool' || part.type.startsWith('tool-');
  if (!isTool || part.input === undefined) return []; // reasoning is not sent again
  const named = { call_id: part.toolCallId };
  const name = part.toolName ?? part.type.slice('tool-'.length);
  const call = { type: 'function_call', ...named, name, arguments: JSON.stringify(part.input) };
  const result = part.state === 'output-error' ? part.errorText : part.output;
  if (result === undefined) return [call];
  const output = typeof result === 'string' ? result : JSON.stringify(result);
  return [call, { type: 'function_call_output', ...named, output }];
}

function keyOf(chatId: string): string {
  return `penstock:chat:${chatId}`;
}

function defaultStorage(): JobStorage {
  if (typeof window !== 'undefined') return window.localStorage;
  const jobs = new Map<string, string>();
  return {
    getItem: (key) => jobs.get(key) ?? null,
    setItem: (key, jobId) => void jobs.set(key, jobId),
    removeItem: (key) => void jobs.delete(key),
  };
}
