/** The chat that is open: asks, follows the answer, keeps both. One answer is followed at a time. */

import { answerOf, answerOfJob, hasOutput, isOver, newAnswer, newId } from "./answer.js";
import { StorageFull, titleOf } from "./chats.js";
import { factsOf, timingOf } from "./facts.js";
import { itemsOf } from "./history.js";
import { resumedWords, waitingWords } from "./job_state.js";
import { LiveAnswer } from "./live_answer.js";
import { Meter } from "./meter.js";
import { QueuePlace } from "./queue_place.js";
import { plural } from "./units.js";

const BUSY = "An answer is running: stop it, or wait until it ends.";

const TOO_LONG = "context_length_exceeded";

const newChat = () => ({ id: newId(), title: "New chat", updatedMs: Date.now(), turns: [] });

/** The outcome of an answer, in a sentence. */
function sentenceOf(answer) {
  if (answer.status === "cancelled") {
    return `Stopped: the job is cancelled after ${plural(answer.numTokens, "token")}.`;
  }
  if (answer.error !== null) return hasOutput(answer) ? "The answer is incomplete." : "No answer.";
  if (answer.isCut && !hasOutput(answer)) return "Ended at the token limit, while still thinking.";
  if (answer.isCut) return "Ended at the token limit.";
  return answer.calls.length > 0 ? "The model calls tools." : "Answered.";
}

export class Session {
  chat = newChat();
  #page;
  #live = null;
  #isKept = true; // whether the browser has room for this chat

  /**
   * `page` has `chats`, `conversation`, `bodyOf()` (a request's members), `say(sentence)`,
   * `warn(sentence)`, `changed()`, `giveBack(question)`, `announce(text)`, and `share` and `showJob`
   * of an answer.
   */
  constructor(page) {
    this.#page = page;
  }

  get isBusy() {
    return this.#live !== null;
  }

  get isEmpty() {
    return this.chat.turns.length === 0;
  }

  /** Opens a chat, or a new one, and resumes its running answer. */
  open(chat = newChat()) {
    this.#live?.leave();
    this.#live = null;
    this.chat = structuredClone(chat); // what another tab saves is not written into by this one
    this.#page.warn("");
    this.#page.conversation.show(this.chat.turns, this.#actions());
    this.chat.turns.forEach(({ answer }, index) => {
      if (answer) this.#page.conversation.at(index).facts = factsOf(answer);
    });
    const last = this.chat.turns.at(-1)?.answer;
    if (last && !isOver(last)) void this.#follow(last, null);
    this.#page.changed(); // it may be busy now
  }

  /** Another tab saved or deleted chats: shows its version of this one. */
  reload() {
    const stored = this.#page.chats.get(this.chat.id);
    if (stored === null) {
      if (!this.isEmpty && !this.isBusy && this.#isKept) this.open();
      return;
    }
    const keyOf = ({ turns }) => turns.at(-1)?.answer?.key;
    if (!this.isBusy || keyOf(stored) !== keyOf(this.chat)) this.open(stored);
  }

  /** Asks a question. Returns false where it cannot be asked now. */
  ask(text) {
    return this.#answer([...this.chat.turns, { role: "user", text }], text);
  }

  /** Cancels the answer under way. */
  stop() {
    void this.#live?.stop();
  }

  /** Saves the received part: the page may be closed. */
  keep() {
    try {
      this.#page.chats.save(this.chat);
      this.#isKept = true;
      this.#page.warn("");
    } catch (error) {
      if (!(error instanceof StorageFull)) throw error;
      this.#isKept = false;
      this.#page.warn(`${error.message} Until then it is lost when you close this tab.`);
    }
  }

  #actions() {
    const before = (index) => this.chat.turns.slice(0, index);
    return {
      edit: (index, text) => this.#answer([...before(index), { role: "user", text }], null),
      regenerate: (index) => this.#answer(before(index), null),
      results: (index) => this.#answer(before(index + 1), null),
      share: (answer) => this.#page.share(answer),
      showJob: (answer) => this.#page.showJob(answer),
    };
  }

  /** Answers turns, whose last is to be answered. `question`: comes back where it is refused. */
  #answer(turns, question) {
    if (this.isBusy) {
      this.#page.say(BUSY);
      return false;
    }
    if (this.#page.chats.isAnswering(this.chat.id)) {
      this.open(this.#page.chats.get(this.chat.id));
      this.#page.say("Another tab asked in this chat.");
      return false;
    }
    const body = this.#page.bodyOf();
    if (body === null) return false;
    const answer = newAnswer({ ...body, input: itemsOf(turns) });
    const isMore = turns.length >= this.chat.turns.length;
    if (this.isEmpty) this.chat.title = titleOf(turns[0].text);
    this.chat.turns = [...turns, { role: "assistant", answer }];
    this.chat.updatedMs = Date.now();
    if (isMore) this.#page.conversation.add(this.chat.turns, this.#actions());
    else this.open(this.chat);
    if (!this.isBusy) void this.#follow(answer, question);
    this.keep();
    this.#page.changed();
    return true;
  }

  async #follow(answer, question) {
    const { say, conversation, announce } = this.#page;
    const view = conversation.at(-1);
    const place = new QueuePlace(say);
    const meter = new Meter(answer.id === null);
    const chat = this.chat;
    let said = null;
    const live = new LiveAnswer(answer, {
      say: (text) => {
        said = text;
        say(text);
      },
      created: () => this.keep(),
      changed: (event) => {
        if (answer.status === "queued") place.start(answer.id, answer.model);
        else place.stop();
        if (event.type.endsWith(".delta")) {
          const doing = event.type === "response.reasoning_text.delta" ? "Thinking…" : "Answering…";
          if (said !== doing) say((said = doing)); // once: it is read aloud
          meter.tick(answer.numTokens);
        }
        if (event.type === "recovery") {
          meter.pause();
          say((said = `${answer.loss ? waitingWords(answer.loss) : resumedWords(answer.rescues.at(-1))}.`));
        }
        view.facts = meter;
        view.changed(event);
      },
    });
    this.#live = live;
    say(answer.id === null ? "Waiting for the answer…" : "Resuming the answer…");
    await live.run();
    place.stop();
    if (this.#live !== live) return; // another chat is open
    this.#live = null;
    if (isOver(answer)) {
      if (this.chat === chat) this.keep(); // before anything that may take long
      answer.timing = answer.id === null ? null : await timingOf(answer, meter);
      say(sentenceOf(answer));
      announce(answer.text);
    } else {
      say("No longer connected. The job may still run: reload the page to resume.");
    }
    if (this.chat !== chat) return;
    if (answer.code === TOO_LONG && chat.turns.length > 2) {
      answer.error += " A new chat has room again.";
    }
    view.facts = factsOf(answer);
    conversation.follow(() => view.show());
    if (question !== null && answer.status === "refused") this.#page.giveBack(question);
    this.keep();
    this.#page.changed();
  }
}

/** A chat of a job's text; the question is not stored as text. */
export function jobChat(job) {
  const chat = newChat();
  chat.title = titleOf(`Job ${job.id}`);
  chat.turns.push({ role: "assistant", answer: answerOfJob(job) });
  return chat;
}

/** A chat of another client's response: `items` are its input. */
export function sharedChat(responseId, items) {
  const chat = newChat();
  for (const { type, role, content } of items) {
    if (type !== "message") continue;
    const text = content.map((part) => part.text ?? part.refusal).join("");
    const answer = { ...answerOf(null), text, status: "completed" };
    chat.turns.push(role === "user" ? { role, text } : { role: "assistant", answer });
  }
  chat.turns.push({ role: "assistant", answer: answerOf(responseId) });
  chat.title = titleOf(chat.turns.find(({ role }) => role === "user")?.text ?? "Shared answer");
  return chat;
}
