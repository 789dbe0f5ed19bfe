/** The chats at the side: searched, opened, imported from a file. */

import { isOver } from "./answer.js";
import { element } from "./element.js";
import { count, plural } from "./units.js";

const MAX_SHOWN = 200;
const DAY_MS = 86_400_000;
const TIME = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

const when = (ms) => (Date.now() - ms < DAY_MS ? TIME : DATE).format(ms);

export class ChatList {
  #chats;
  #list;
  #search;
  #note;
  #onOpen;
  #openId = null;

  /** `onOpen(chat)`: it was chosen. */
  constructor(chats, { list, search, note }, onOpen) {
    this.#chats = chats;
    this.#list = list;
    this.#search = search;
    this.#note = note;
    this.#onOpen = onOpen;
    search.addEventListener("input", () => this.show());
  }

  /** Shows the list as it is now; `openId`: of the chat that is open. */
  show(openId = this.#openId) {
    this.#openId = openId;
    const found = this.#chats.find(this.#search.value).slice(0, MAX_SHOWN);
    const focused = this.#list.contains(document.activeElement)
      ? document.activeElement.dataset.id
      : null;
    this.#list.replaceChildren(...found.map((chat) => this.#item(chat)));
    if (focused) this.#list.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
    const isSearch = this.#search.value.trim() !== "";
    const none = isSearch ? "No chats match this search." : "No chats yet.";
    const number = isSearch ? `${count(found.length)} found.` : plural(found.length, "chat");
    this.#note.textContent = found.length === 0 ? none : number;
  }

  #item(chat) {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    button.dataset.id = chat.id;
    const last = chat.turns.at(-1)?.answer;
    const isRunning = last !== undefined && !isOver(last);
    button.append(
      element("span", "title", chat.title),
      element("span", "when", isRunning ? "answering" : when(chat.updatedMs)),
    );
    if (chat.id === this.#openId) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => this.#onOpen(chat));
    item.append(button);
    return item;
  }
}
