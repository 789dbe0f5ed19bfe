/** One message of the conversation on the page. All text goes in as text, never as markup. */

import { element } from "./element.js";
import { jobPath } from "./service.js";

/** Whoever speaks, the text so far, an error if there was one, and a line of facts. */
export class Turn {
  #body = element("div", "text");
  #text = document.createTextNode("");
  #error = element("p", "error");
  #facts = element("p", "facts");
  #measures = element("span");
  #jobLink = null;
  #jobId = null;

  constructor(role, text = "") {
    this.role = role;
    this.node = element("article", `turn ${role}`);
    this.node.append(element("h2", "who", role === "user" ? "You" : "Model"), this.#body);
    this.#body.append(this.#text);
    this.append(text);
  }

  get text() {
    return this.#text.data;
  }

  append(text) {
    this.#text.appendData(text);
  }

  /** While busy, screen readers hold the announcement back until the answer is whole. */
  set busy(busy) {
    this.node.setAttribute("aria-busy", String(busy));
    this.node.classList.toggle("busy", busy);
    this.#body.hidden = !busy && this.text === "";
  }

  set facts(text) {
    this.#measures.textContent = text;
    if (!this.#facts.isConnected) {
      this.#facts.append(this.#measures, " ");
      this.node.append(this.#facts);
    }
  }

  /** The job's id, or null before it is known. */
  get job() {
    return this.#jobId;
  }

  set job(jobId) {
    this.#jobId = jobId;
    if (this.#jobLink === null) {
      this.facts = this.#measures.textContent;
      this.#jobLink = element("a", "job");
      this.#jobLink.target = "_blank";
      this.#jobLink.rel = "noopener";
      this.#facts.append(this.#jobLink);
    }
    this.#jobLink.textContent = jobId;
    this.#jobLink.href = jobPath(jobId);
    this.#jobLink.title = "The job as the service sees it";
  }

  set error(message) {
    this.#error.textContent = message;
    this.#error.setAttribute("role", "alert");
    this.#body.after(this.#error);
  }
}
