/** The playground: chats with the served models. Each answer is a job that outlives this page. */

import { ChatList } from "./chat_list.js";
import { wireImport } from "./chat_file.js";
import { wireChatMenu } from "./chat_menu.js";
import { Chats } from "./chats.js";
import { showContext } from "./context_meter.js";
import { Conversation } from "./conversation.js";
import { showText } from "./dialogs.js";
import { Drawer } from "./drawer.js";
import { setText } from "./element.js";
import { jobLink } from "./job_state.js";
import { showIcons } from "./icons.js";
import { keyGiven } from "./key.js";
import { clearLink, disclosed, linkOf, linkedChat, linkedJob, refusalOf } from "./link.js";
import { cancelAnswer } from "./live_answer.js";
import { showLoading } from "./loading.js";
import { ModelPicker } from "./model_picker.js";
import { ServiceError } from "./service.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { browserStore, tabStore } from "./storage.js";
import { showSuggestions } from "./suggestions.js";
import { isOver } from "./answer.js";

const OPEN = "penstock-open"; // of this tab: the chat that a reload opens again
const DRAFT = "penstock-draft"; // of this tab
const NOT_KEPT = "This browser stores nothing for this page: chats are lost when you close this tab.";
const MAX_SPOKEN_CHARS = 2000;
const LINK_RETRY_MS = 2000;

const byId = (id) => document.getElementById(id);
const message = byId("message");
const send = byId("send");
const stop = byId("stop");
const dialog = byId("settings");

const say = (text) => (byId("status").textContent = text);
const warn = (text) => {
  setText(byId("warning"), text); // an unchanged text is not read aloud again
  byId("warning").hidden = text === "";
};

const chats = new Chats((id) => {
  if (id === null || id === session.chat.id) session.reload();
  list.show();
});
const settings = new Settings(byId("settings-form"), showSettingsCount);
let linkRefused = ""; // why the linked answer is not shown; the model picker appends its status
let maxTokens = null; // the context of the chosen model
const picker = new ModelPicker(byId("model"), {
  say: (text) => {
    if (!session.isBusy) say(`${linkRefused} ${text}`.trim());
  },
  loading: (workers) => showLoading(byId("loading"), workers),
  ready: setControls,
  chosen: (model) => {
    showSuggestions(byId("suggestions"), model);
    settings.showDefaults(model);
    maxTokens = model?.max_model_len ?? null;
    showContext(byId("context"), session.chat.turns, maxTokens);
  },
});
const session = new Session({
  chats,
  conversation: new Conversation(byId("conversation"), byId("welcome")),
  bodyOf,
  say,
  warn,
  changed: setControls,
  giveBack: (question) => {
    if (message.value === "") message.value = question;
  },
  announce: (text) => (byId("spoken").textContent = text.slice(0, MAX_SPOKEN_CHARS)),
  share: ({ id }) => void showText("Share this answer", disclosed, linkOf(id)),
  showJob: ({ id }) => location.assign(`dashboard${jobLink(id)}`),
});
const list = new ChatList(
  chats,
  { list: byId("chat-list"), search: byId("search"), note: byId("chats-note") },
  (chat) => openChat(chat),
);
const drawer = new Drawer(byId("chats"), byId("show-chats"), byId("chat"));

function setControls() {
  const isBusy = session.isBusy;
  send.hidden = isBusy;
  stop.hidden = !isBusy;
  send.disabled = !picker.isReady;
  byId("chat-menu").hidden = session.isEmpty;
  byId("chat-title").textContent = session.chat.title;
  tabStore.set(OPEN, session.isEmpty ? "" : session.chat.id);
  showContext(byId("context"), session.chat.turns, maxTokens);
  list.show(session.chat.id);
}

function showSettingsCount() {
  const { count } = settings;
  byId("settings-count").textContent = count === 0 ? "Settings" : `Settings · ${count}`;
}

/** The members of a request, or null while a setting is not valid, which is then shown. */
function bodyOf() {
  if (settings.isValid) {
    clearLink(); // the chat is more than the linked answer now
    return { model: picker.model, ...settings.body() };
  }
  dialog.showModal();
  settings.report();
  return null;
}

function openChat(chat) {
  drawer.close();
  clearLink();
  linkRefused = "";
  session.open(chat);
  if (!session.isBusy) say(chat ? "" : "A new chat.");
  message.focus();
}

/** Opens the answer that the address names; tries again once a key is given, or the server answers. */
async function openLink(id) {
  say("Looking for the shared answer…");
  while (linkedJob() === id) { // no other chat was opened meanwhile
    linkRefused = "";
    try {
      const chat = await linkedChat(chats, id);
      return void (linkedJob() === id && session.open(chat));
    } catch (error) {
      if (linkedJob() !== id) return;
      if (!(error instanceof ServiceError)) throw error;
      const refusal = refusalOf(error);
      say(error.isPassing ? `${refusal} Trying again…` : refusal);
      if (error.status === 401) await keyGiven();
      else linkRefused = refusal;
      if (linkRefused && !error.isPassing) return;
      if (linkRefused) await new Promise((resolve) => setTimeout(resolve, LINK_RETRY_MS));
    }
  }
}

/** Opens the chat that this tab had open, else the newest one with a running answer. */
function openAgain() {
  const isRunning = ({ turns }) => turns.at(-1)?.answer && !isOver(turns.at(-1).answer);
  const open = tabStore.get(OPEN);
  session.open(open === null ? chats.find().find(isRunning) : (chats.get(open) ?? undefined));
}

function submit(text) {
  if (text.trim() === "") return;
  if (!picker.isReady) {
    message.value = text; // it waits there for a model
    return;
  }
  if (!session.ask(text)) return;
  message.value = "";
  tabStore.remove(DRAFT);
  message.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(message.value);
});
message.addEventListener("input", () => tabStore.set(DRAFT, message.value));
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit(message.value);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) session.stop();
});
stop.addEventListener("click", () => {
  session.stop();
  message.focus();
});
byId("new-chat").addEventListener("click", () => openChat());
byId("show-settings").addEventListener("click", () => dialog.showModal());
byId("suggestions").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) submit(button.textContent);
});
wireImport(byId("import"), chats, (sentence) => {
  say(sentence);
  list.show();
});
wireChatMenu(byId("chat-menu"), session, {
  renamed: (title) => {
    session.chat.title = title;
    session.keep();
    setControls();
  },
  deleted: () => {
    const last = session.chat.turns.at(-1)?.answer;
    if (last?.id && !isOver(last)) void cancelAnswer(last).catch(({ message: text }) => say(text));
    chats.delete(session.chat.id);
    openChat();
    say("Chat deleted.");
  },
});
addEventListener("pagehide", () => {
  if (session.isBusy) session.keep();
});
addEventListener("hashchange", () => {
  if (linkedJob() !== null) void openLink(linkedJob());
});

showIcons();
message.value = tabStore.get(DRAFT) ?? "";
showSettingsCount();
if (linkedJob() === null) openAgain();
else void openLink(linkedJob());
setControls();
if (browserStore.isBlocked) {
  byId("kept").textContent = NOT_KEPT;
  warn(NOT_KEPT);
}
void picker.load();
