/**
 * The settings of a request: a form, kept in this browser. An empty field is not sent: the
 * model's default applies, or the service's.
 */

import { browserStore } from "./storage.js";

const NAME = "penstock-settings";
const NUMBERS = {
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  "presence-penalty": "presence_penalty",
  "frequency-penalty": "frequency_penalty",
  "repetition-penalty": "repetition_penalty",
  seed: "seed",
  "max-tokens": "max_output_tokens",
};
// Of the service, where the model has none.
const DEFAULTS = {
  temperature: 1,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  presence_penalty: 0,
  frequency_penalty: 0,
  repetition_penalty: 1,
  seed: "random",
};
const JSON_FIELDS = { tools: toolsOf, schema: formatOf };

/** Tools as Responses have them; those of chat completions are taken, too. */
function toolsOf(value) {
  const tools = Array.isArray(value) ? value : [value];
  return tools.map((tool) => ({ type: "function", ...(tool?.function ?? tool) }));
}

/** A format of a bare schema, or of one with a name, as the APIs have them. */
function formatOf(value) {
  const named = value?.json_schema ?? value;
  const isNamed = typeof named?.name === "string" && typeof named.schema === "object";
  return { type: "json_schema", ...(isNamed ? named : { name: "answer", schema: value }) };
}

/** A stop string to a line; `\n` in one is a new line. */
const stopsOf = (text) =>
  text
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => line.replaceAll("\\n", "\n"));

export class Settings {
  #form;
  #onChange;

  /** Takes a form with an element for each name above; `onChange()` follows each change. */
  constructor(form, onChange) {
    this.#form = form;
    this.#onChange = onChange;
    this.#restore();
    form.addEventListener("input", () => this.#changed());
    form.addEventListener("reset", () => setTimeout(() => this.#changed()));
  }

  #field(id) {
    return this.#form.elements.namedItem(id);
  }

  #restore() {
    let kept = {};
    try {
      kept = JSON.parse(browserStore.get(NAME)) ?? {};
    } catch {
      // Not of this page: the fields stay empty.
    }
    for (const field of this.#fields) field.value = kept[field.id] ?? "";
    this.#check();
  }

  get #fields() {
    return [...this.#form.elements].filter((field) => field.matches("input, select, textarea"));
  }

  #changed() {
    this.#check();
    const set = this.#fields.filter(({ value }) => value !== "");
    browserStore.set(NAME, JSON.stringify(Object.fromEntries(set.map((f) => [f.id, f.value]))));
    this.#onChange();
  }

  #check() {
    for (const id of Object.keys(JSON_FIELDS)) {
      const field = this.#field(id);
      field.setCustomValidity("");
      if (field.value.trim() === "") continue;
      try {
        JSON.parse(field.value);
      } catch (error) {
        field.setCustomValidity(`This is not JSON: ${error.message}`);
      }
    }
  }

  /** Shows what holds for an empty field: the defaults of `model`, of GET /v1/models. */
  showDefaults(model) {
    const defaults = { ...DEFAULTS, ...model?.default_sampling };
    if (model) defaults.max_output_tokens = `up to ${model.max_model_len}`;
    for (const [id, name] of Object.entries(NUMBERS)) {
      const field = this.#field(id);
      field.placeholder = String(defaults[name] ?? "");
      const { min, max } = field;
      if (min !== "" && max !== "") field.title = `From ${min} to ${max}; empty: ${field.placeholder}`;
    }
  }

  /** How many settings are set. */
  get count() {
    return this.#fields.filter(({ value }) => value.trim() !== "").length;
  }

  get isValid() {
    return this.#form.checkValidity();
  }

  /** Shows the invalid fields. */
  report() {
    this.#form.reportValidity();
  }

  /** The members of a request that are set. */
  body() {
    const body = {};
    for (const [id, name] of Object.entries(NUMBERS)) {
      const { value } = this.#field(id);
      if (value !== "") body[name] = Number(value);
    }
    const stop = stopsOf(this.#field("stop-texts").value);
    if (stop.length > 0) body.stop = stop;
    const system = this.#field("system").value;
    if (system.trim() !== "") body.instructions = system;
    if (this.#field("thinking").value === "off") body.reasoning = { effort: "none" };
    const json = (id) => {
      const text = this.#field(id).value.trim();
      return text === "" ? null : JSON_FIELDS[id](JSON.parse(text));
    };
    const [tools, format] = [json("tools"), json("schema")];
    if (tools !== null) body.tools = tools;
    if (format !== null) body.text = { format };
    return body;
  }
}
