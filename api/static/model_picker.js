/** The list of models to choose from; the choice is kept in this browser. */

import { ServiceError, listModels } from "./service.js";

const NAME = "penstock-model";
const RETRY_MS = 2000;

export class ModelPicker {
  #select;
  #say;
  #onReady;

  /** `onReady()`: there are models now. */
  constructor(select, say, onReady) {
    this.#select = select;
    this.#say = say;
    this.#onReady = onReady;
    select.addEventListener("change", () => sessionStorage.setItem(NAME, select.value));
    select.addEventListener("change", () => localStorage.setItem(NAME, select.value));
    addEventListener("visibilitychange", () => {
      if (!document.hidden && this.isReady) void this.#refresh();
    });
  }

  get isReady() {
    return this.#select.options.length > 0;
  }

  get model() {
    return this.#select.value;
  }

  /** Asks until there is a model. */
  async load() {
    for (;;) {
      try {
        const models = await listModels();
        if (models.length > 0) {
          this.#show(models);
          const name = models.length === 1 ? models[0].id : `${models.length} models`;
          const isServed = models.some((model) => model.is_served);
          const none = "No worker is alive. Questions wait until one comes.";
          this.#onReady();
          this.#say(isServed ? `Ready: ${name}.` : none);
          return;
        }
        this.#say("No worker serves a model yet. Waiting for one…");
      } catch (error) {
        if (!(error instanceof ServiceError)) throw error;
        this.#say(`${error.message} Trying again…`);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async #refresh() {
    try {
      const models = await listModels();
      if (models.length > 0) this.#show(models);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error; // the list stays as it was
    }
  }

  #show(models) {
    const select = this.#select;
    const chosen = select.value || sessionStorage.getItem(NAME) || localStorage.getItem(NAME);
    const ids = models.map(({ id }) => id);
    if ([...select.options].map(({ value }) => value).join("\n") !== ids.join("\n")) {
      select.replaceChildren(...ids.map((id) => new Option(id, id)));
    }
    if (ids.includes(chosen)) select.value = chosen;
    select.disabled = ids.length < 2;
  }
}
