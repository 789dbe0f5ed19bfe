/** Chats as files: JSON, which can be imported again, and Markdown. */

import { isOver, newId } from "./answer.js";
import { StorageFull, isChat } from "./chats.js";
import { element } from "./element.js";
import { plural } from "./units.js";

const VERSION = 1;
const MAX_FILE_BYTES = 16 * 1024 * 1024;

function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (chat, ending) =>
  `${chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat"}.${ending}`;

export function downloadJson(chat) {
  const text = JSON.stringify({ penstock_chats: VERSION, chats: [chat] }, null, 2);
  download(fileName(chat, "json"), "application/json", text);
}

function answerText(answer) {
  const calls = answer.calls.map((call) => `Call of ${call.name}:\n\n~~~json\n${call.arguments}\n~~~`);
  const error = answer.error === null || answer.error === undefined ? [] : [`> ${answer.error}`];
  const isThere = (part) => part !== "";
  return [answer.text, ...calls, ...error].filter(isThere).join("\n\n");
}

/** The chat as Markdown; reasoning is left out. */
function markdownOf(chat) {
  const parts = chat.turns.map(({ role, text, answer }) =>
    role === "user" ? `**You**\n\n${text}` : `**${answer.model ?? "Model"}**\n\n${answerText(answer)}`,
  );
  return `# ${chat.title}\n\n${parts.join("\n\n---\n\n")}\n`;
}

export function downloadMarkdown(chat) {
  download(fileName(chat, "md"), "text/markdown", markdownOf(chat));
}

/** The chats of a file, with new ids. Throws RangeError with a sentence for any other file. */
async function chatsOfFile(file) {
  if (file.size > MAX_FILE_BYTES) throw new RangeError("The file is too large for chats.");
  let content = null;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new RangeError("The file is not JSON.");
  }
  const chats = content?.chats;
  if (content?.penstock_chats !== VERSION || !Array.isArray(chats) || !chats.every(isChat)) {
    throw new RangeError("The file has no chats of this page.");
  }
  for (const chat of chats) {
    chat.id = newId();
    // An answer that was running belongs to another browser: only its text in the file is kept.
    for (const { answer } of chat.turns) if (answer && !isOver(answer)) answer.status = "lost";
  }
  return chats;
}

/** Imports the chats of the chosen file; `announce(sentence)` reports the result. */
export function wireImport(input, chats, announce) {
  input.addEventListener("change", async () => {
    try {
      const brought = await chatsOfFile(input.files[0]);
      for (const chat of brought) chats.save(chat);
      announce(`${plural(brought.length, "chat")} imported.`);
    } catch (error) {
      if (!(error instanceof RangeError || error instanceof StorageFull)) throw error;
      announce(error.message);
    }
    input.value = "";
  });
}
