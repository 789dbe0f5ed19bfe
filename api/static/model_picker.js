/**
 * The list of models to choose from; the choice is kept in this browser. Until a worker serves one,
 * it asks again and again, and shows how far the workers are.
 */

import { listLoading } from "./loading.js";
import { ServiceError, listModels } from "./service.js";
import { browserStore, tabStore } from "./storage.js";

const NAME = "penstock-model";
const RETRY_MS = 2000;
const NONE = "No worker serves a model yet. Waiting…";
const LOADING = "A model is loading. You can ask once it is ready.";
const AWAY = "No worker is alive. Questions wait until one starts.";
const COMING = "A worker is loading. Questions wait until it is ready.";

export class ModelPicker {
  #select;
  #page;
  #said = "";
  #models = [];

  /**
   * `page` has `say(sentence)`, `loading(workers)`, `ready()`: there are models now, and
   * `chosen(model)`: this one is, or has new facts.
   */
  constructor(select, page) {
    this.#select = select;
    this.#page = page;
    select.addEventListener("change", () => {
      tabStore.set(NAME, select.value);
      browserStore.set(NAME, select.value);
      this.#choose();
    });
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

  /** Asks until a worker serves a model. */
  async load() {
    for (;;) {
      try {
        if (await this.#look()) return;
      } catch (error) {
        if (!(error instanceof ServiceError)) throw error;
        this.#say(`${error.message} Trying again…`);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  /** Returns whether a worker serves a model. */
  async #look() {
    const models = await listModels();
    const isServed = models.some((model) => model.is_served);
    const loading = isServed ? [] : await listLoading();
    if (models.length > 0) this.#show(models);
    this.#page.loading(loading);
    const name = models.length === 1 ? models[0].id : `${models.length} models`;
    if (isServed) this.#say(`Ready: ${name}.`);
    else if (models.length > 0) this.#say(loading.length > 0 ? COMING : AWAY);
    else this.#say(loading.length > 0 ? LOADING : NONE);
    return isServed;
  }

  /** Announces a new status: it is read aloud. */
  #say(sentence) {
    if (sentence !== this.#said) this.#page.say(sentence);
    this.#said = sentence;
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
    const wasReady = this.isReady;
    const chosen = select.value || tabStore.get(NAME) || browserStore.get(NAME);
    const ids = models.map(({ id }) => id);
    if ([...select.options].map(({ value }) => value).join("\n") !== ids.join("\n")) {
      select.replaceChildren(...ids.map((id) => new Option(id, id)));
    }
    if (ids.includes(chosen)) select.value = chosen;
    select.disabled = ids.length < 2;
    this.#models = models;
    this.#choose();
    if (!wasReady) this.#page.ready();
  }

  #choose() {
    this.#page.chosen(this.#models.find(({ id }) => id === this.model));
  }
}
