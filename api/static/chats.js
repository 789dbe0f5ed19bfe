/**
 * The conversations, kept in this browser's local storage, one entry each, and shared by its tabs.
 *
 * A chat is {id, title, updatedMs, turns}; a turn is {role: "user", text} or {role: "assistant",
 * answer}. Changes of other tabs arrive as events. Nothing is deleted without being asked: if
 * there is no room, `save` throws StorageFull and the chat lives only in this tab.
 */

import { isOver } from "./answer.js";
import { browserStore } from "./storage.js";

const PREFIX = "penstock-chat-";
const MAX_CHATS = 200;
const MAX_CHAT_CHARS = 1_000_000;
const MAX_TITLE_CHARS = 60;

export class StorageFull extends Error {}

/** The title that a first question gives: its first line, without the marks of Markdown. */
export function titleOf(question) {
  const line = question
    .trim()
    .split("\n", 1)[0]
    .slice(0, 10 * MAX_TITLE_CHARS) // the patterns below take their time on a long line
    .replace(/^(#{1,6}|>|[-*+]|\d+[.)])\s+/, "")
    .replace(/!?\[([^\]]+)\]\([^)]*\)/g, "$1")
    .replace(/(\*\*|__|`)(.+?)\1/g, "$2")
    .trim();
  return line.length > MAX_TITLE_CHARS ? `${line.slice(0, MAX_TITLE_CHARS - 1)}…` : line;
}

/** Whether `value` has a chat's shape: it may be of a file, or of another release. */
export function isChat(value) {
  const isTurn = (turn) =>
    turn?.role === "user"
      ? typeof turn.text === "string"
      : turn?.role === "assistant" &&
        typeof turn.answer?.text === "string" &&
        typeof turn.answer.reasoning === "string" &&
        typeof turn.answer.status === "string" &&
        Array.isArray(turn.answer.calls);
  return (
    typeof value?.id === "string" &&
    typeof value.title === "string" &&
    Number.isFinite(value.updatedMs) &&
    Array.isArray(value.turns) &&
    value.turns.every(isTurn)
  );
}

function parsed(text) {
  try {
    const chat = JSON.parse(text);
    return isChat(chat) ? chat : null;
  } catch {
    return null; // not of this page
  }
}

export class Chats {
  #chats = new Map(); // by id
  #onChange;

  /** `onChange(id)`: another tab saved or deleted that chat; null: all of them. */
  constructor(onChange) {
    this.#onChange = onChange;
    for (const key of browserStore.keys) this.#read(key, browserStore.get(key));
    addEventListener("storage", ({ key, newValue }) => {
      if (key !== null && !key.startsWith(PREFIX)) return;
      if (key === null) this.#chats.clear();
      else if (newValue === JSON.stringify(this.get(key.slice(PREFIX.length)))) return;
      else this.#read(key, newValue);
      this.#onChange(key === null ? null : key.slice(PREFIX.length));
    });
  }

  #read(key, text) {
    if (!key.startsWith(PREFIX)) return;
    const chat = text === null ? null : parsed(text);
    if (chat === null) this.#chats.delete(key.slice(PREFIX.length));
    else this.#chats.set(chat.id, chat);
  }

  /** The chats whose title or text contains every word of `query`, newest first. */
  find(query = "") {
    const terms = query.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = ({ title, turns }) =>
      [title, ...turns.map((turn) => turn.text ?? turn.answer.text)].join("\n").toLowerCase();
    return [...this.#chats.values()]
      .filter((chat) => terms.length === 0 || terms.every((term) => texts(chat).includes(term)))
      .sort((one, other) => other.updatedMs - one.updatedMs);
  }

  get(id) {
    return this.#chats.get(id) ?? null;
  }

  /** Whether an answer of that chat is under way, also when another tab asked a moment ago. */
  isAnswering(id) {
    const text = browserStore.get(PREFIX + id);
    const last = text === null ? undefined : parsed(text)?.turns.at(-1)?.answer;
    if (last === undefined || isOver(last)) return false;
    this.#read(PREFIX + id, text);
    return true;
  }

  /** The chat that has the answer with this id, or null. */
  withAnswer(id) {
    const has = ({ turns }) => turns.some((turn) => turn.answer?.id === id);
    return [...this.#chats.values()].find(has) ?? null;
  }

  /** Keeps the chat as it is now. Throws StorageFull. */
  save(chat) {
    if (!this.#chats.has(chat.id) && this.#chats.size >= MAX_CHATS) {
      throw new StorageFull(`${MAX_CHATS} chats are saved: delete one to save this one.`);
    }
    const text = JSON.stringify(chat);
    if (text.length > MAX_CHAT_CHARS) {
      throw new StorageFull("This chat is too long to be saved.");
    }
    if (!browserStore.keep(PREFIX + chat.id, text)) {
      throw new StorageFull("This browser's storage is full: delete a chat to save this one.");
    }
    this.#chats.set(chat.id, JSON.parse(text)); // a copy: the caller's still changes
  }

  delete(id) {
    this.#chats.delete(id);
    browserStore.remove(PREFIX + id);
  }
}
