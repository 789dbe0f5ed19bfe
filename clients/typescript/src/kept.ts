/*
 * The delivered part of an answer: a connection that repeats it from its start is compared with it.
 */
import type { Choice, Delta, Json } from './answer.js';
import { StreamLost } from './errors.js';

/** A text that grows. Pieces that are there already are compared and left out. */
class KeptText {
  whole = '';
  private place = 0; // of the connection's text

  repeat(): void {
    this.place = 0;
  }

  /** Returns the new part of the next piece. Throws StreamLost if it differs. */
  rest(piece: string): string {
    const had = this.whole.slice(this.place, this.place + piece.length);
    this.place += piece.length;
    if (!piece.startsWith(had)) throw differs();
    const added = piece.slice(had.length);
    this.whole += added;
    return added;
  }
}

/** A list that grows, in the same way. */
class KeptList {
  whole: any[] = [];
  private place = 0;

  repeat(): void {
    this.place = 0;
  }

  rest(piece: readonly any[]): any[] {
    const had = this.whole.slice(this.place, this.place + piece.length);
    this.place += piece.length;
    if (JSON.stringify(had) !== JSON.stringify(piece.slice(0, had.length))) throw differs();
    const added = piece.slice(had.length);
    this.whole.push(...added);
    return added;
  }
}

function differs(): StreamLost {
  return new StreamLost('The resumed stream does not match the text already received.');
}

/** A tool call: its first part with id and name, then parts of its arguments. */
class KeptCall {
  private arguments = new KeptText();

  constructor(private first: Json) {}

  repeat(): void {
    this.arguments.repeat();
  }

  /** Returns the new part of a part; null: nothing. Throws StreamLost. */
  rest(part: Json): Json | null {
    const added = this.arguments.rest(part.function?.arguments || '');
    if (part === this.first) return { ...part };
    return added ? { index: part.index, function: { arguments: added } } : null;
  }

  /** The call as in a whole message. */
  get whole(): Json {
    const called = { ...this.first.function, arguments: this.arguments.whole };
    return { id: this.first.id, type: 'function', function: called };
  }
}

/** The part of a choice in an event. */
export interface Part {
  text?: string | undefined;
  reasoning?: string | undefined;
  toolCalls?: Json[] | undefined;
  tokenIds?: number[] | undefined;
  logprobs?: Json | null | undefined;
  finishReason?: string | null | undefined;
  stopReason?: string | number | null | undefined;
}

/** One choice of an answer. */
export class KeptChoice {
  private text = new KeptText();
  private reasoning = new KeptText();
  private tokenIds = new KeptList();
  private logprobs = new Map<string, KeptList>();
  private calls = new Map<number, KeptCall>();
  private finishReason: string | null = null;
  private stopReason: string | number | null = null;

  constructor(private index: number) {}

  /** Expects the choice from its start. */
  repeat(): void {
    for (const kept of [this.text, this.reasoning, this.tokenIds, ...this.logprobs.values(), ...this.calls.values()]) {
      kept.repeat();
    }
  }

  /** Returns the delta of an event. Throws StreamLost. */
  take(event: Json, part: Part): Delta {
    const isEnd = part.finishReason != null && this.finishReason === null;
    if (isEnd) {
      this.finishReason = part.finishReason ?? null;
      this.stopReason = part.stopReason ?? null;
    }
    return {
      text: this.text.rest(part.text || ''),
      index: this.index,
      reasoning: this.reasoning.rest(part.reasoning || ''),
      toolCalls: (part.toolCalls ?? []).map((call) => this.call(call)).filter((call) => call !== null),
      tokenIds: this.tokenIds.rest(part.tokenIds ?? []),
      logprobs: this.restOfLogprobs(part.logprobs ?? {}),
      finishReason: isEnd ? this.finishReason : null,
      event,
    };
  }

  /** Whether none of it was delivered. */
  get isEmpty(): boolean {
    return !this.text.whole && !this.reasoning.whole && !this.tokenIds.whole.length && !this.calls.size && this.finishReason === null;
  }

  /** The delivered part. */
  get whole(): Choice {
    const logprobs = Object.fromEntries([...this.logprobs].map(([name, kept]) => [name, [...kept.whole]]));
    return {
      text: this.text.whole,
      reasoning: this.reasoning.whole,
      toolCalls: sorted(this.calls).map((call) => call.whole),
      tokenIds: [...this.tokenIds.whole],
      logprobs: this.logprobs.size ? logprobs : null,
      finishReason: this.finishReason,
      stopReason: this.stopReason,
    };
  }

  private call(part: Json): Json | null {
    let kept = this.calls.get(part.index);
    if (!kept) this.calls.set(part.index, (kept = new KeptCall(part)));
    return kept.rest(part);
  }

  /** Returns the new entries of each of the lists that log probabilities are. */
  private restOfLogprobs(given: Json): Json | null {
    const lists = Object.entries(given).filter(([, value]) => Array.isArray(value));
    if (!lists.length) return null;
    return Object.fromEntries(
      lists.map(([name, value]) => {
        let kept = this.logprobs.get(name);
        if (!kept) this.logprobs.set(name, (kept = new KeptList()));
        return [name, kept.rest(value)];
      }),
    );
  }
}

/** Returns the values of a map in the order of its numbers. */
export function sorted<Value>(map: Map<number, Value>): Value[] {
  return [...map].sort(([one], [other]) => one - other).map(([, value]) => value);
}

/** Returns whether an event added nothing. */
export function isEmpty(delta: Delta): boolean {
  return !delta.text && !delta.reasoning && !delta.toolCalls.length && !delta.tokenIds.length && delta.finishReason === null;
}
