/** Actions of the open chat: rename, export, delete. */

import { downloadJson, downloadMarkdown } from "./chat_file.js";
import { askText, confirmed } from "./dialogs.js";

/** Wires a <details> whose buttons have `data-action`; `onChange` has `renamed` and `deleted`. */
export function wireChatMenu(menu, session, onChange) {
  const close = () => (menu.open = false);
  const actions = {
    async rename() {
      const title = await askText("Rename this chat", session.chat.title);
      if (title !== null) onChange.renamed(title);
    },
    json: () => downloadJson(session.chat),
    markdown: () => downloadMarkdown(session.chat),
    async delete() {
      const text = `“${session.chat.title}” is deleted from this browser. A running answer is cancelled.`;
      if (await confirmed("Delete this chat?", text, "Delete")) onChange.deleted();
    },
  };
  menu.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    close();
    void actions[button.dataset.action]();
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    close();
    menu.firstElementChild.focus();
  });
  document.addEventListener("click", ({ target }) => {
    if (!menu.contains(target)) close();
  });
}
