/** Shows /openapi.json: an index, a search, and each operation with its parameters. */

import { parameterList, resolved, typeOf, useSchemas, withCode } from "./docs_schema.js";
import { BASE, findModel, tryForm } from "./docs_try.js";
import { element, setText } from "./element.js";
import { ServiceError, look } from "./service.js";

const FIRST_WAIT_MS = 1000;
const MAX_WAIT_MS = 30_000;
const byId = (id) => document.getElementById(id);
const status = byId("status");
const list = byId("operations");
const operations = []; // {details, link, text}

const section = (title, ...nodes) => [element("h4", "", title), ...nodes];

function parametersOf(operation) {
  const rows = (operation.parameters ?? []).map((one) => [
    one.name,
    { ...one.schema, description: `In the ${one.in}. ${one.description}` },
  ]);
  const required = (operation.parameters ?? []).filter((one) => one.required);
  if (!rows.length) return [];
  return section("Parameters", parameterList(rows, required.map((one) => one.name)));
}

/** The parameters of a body by their groups; those without effect are one paragraph. */
function bodyOf(operation) {
  const content = Object.values(operation.requestBody?.content ?? {})[0];
  if (!content) return [];
  const { properties, required, "x-groups": groups } = resolved(content.schema);
  const shown = groups.flatMap(({ title, parameters }) => {
    const rows = parameters.map((name) => [name, properties[name]]);
    if (!rows.every(([, schema]) => schema["x-without-effect"])) {
      return [element("h5", "", title), parameterList(rows, required)];
    }
    const names = element("p");
    names.append("Accepted where they change nothing, as clients send them; refused otherwise: ");
    rows.forEach(([name], index) => names.append(index ? ", " : "", element("code", "", name)));
    return [element("h5", "", title), names];
  });
  return section("Body", ...shown);
}

function responsesOf(operation) {
  const terms = element("dl");
  for (const [code, response] of Object.entries(operation.responses)) {
    const term = element("dt");
    term.append(element("code", "", code));
    for (const [media, { schema }] of Object.entries(response.content ?? {})) {
      const type = schema && Object.keys(schema).length ? `, ${typeOf(schema)}` : "";
      term.append(element("span", "", media + type));
    }
    const text = element("dd");
    text.append(withCode(response.description));
    terms.append(term, text);
  }
  return section("Responses", terms);
}

function operationOf(method, path, operation) {
  const details = element("details", "operation");
  details.id = `${method}${path}`.replace(/\W+/g, "-").replace(/-$/, "");
  const summary = element("summary");
  const title = element("h3");
  title.append(element("code", "", path));
  const words = operation.summary.toLowerCase();
  summary.append(
    element("span", `method ${method}`, method.toUpperCase()),
    title,
    element("span", "title", words[0].toUpperCase() + words.slice(1)),
  );
  details.append(summary);
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const description = element("p");
    description.append(withCode(operation.description));
    const inside = element("div", "inside");
    inside.append(
      description,
      ...section("Example", tryForm(method, path, operation)),
      ...parametersOf(operation),
      ...bodyOf(operation),
      ...responsesOf(operation),
    );
    details.append(inside);
  });
  const link = element("a", "", summary.lastChild.textContent);
  link.href = `#${details.id}`;
  const content = Object.values(operation.requestBody?.content ?? {})[0];
  const names = Object.keys(resolved(content?.schema)?.properties ?? {});
  for (const one of operation.parameters ?? []) names.push(one.name);
  const text = [method, path, words, operation.description, ...names].join(" ").toLowerCase();
  operations.push({ details, link, text });
  return { details, link };
}

/** Opens the operation that the address names. */
function openNamed() {
  let name = location.hash.slice(1);
  try {
    name = decodeURIComponent(name);
  } catch {
    // Not an address of this page's making.
  }
  const details = byId(name);
  if (!details?.matches(".operation")) return;
  details.open = true;
  details.scrollIntoView();
  details.querySelector("summary").focus({ preventScroll: true });
}

function search() {
  const parts = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const { details, link, text } of operations) {
    const isHidden = !parts.every((part) => text.includes(part));
    details.hidden = isHidden;
    link.parentElement.hidden = isHidden;
  }
  for (const part of document.querySelectorAll("#operations section, #index section")) {
    part.hidden = ![...part.querySelectorAll(".operation, li")].some((node) => !node.hidden);
  }
  byId("nothing").hidden = operations.some(({ details }) => !details.hidden);
}

function show({ paths, components }) {
  useSchemas(components.schemas);
  const sections = new Map();
  for (const [path, item] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(item)) {
      const tag = operation.tags[0];
      if (!sections.has(tag)) {
        const [here, index] = [element("section"), element("section")];
        here.append(element("h2", "", tag));
        index.append(element("h2", "", tag), element("ul"));
        sections.set(tag, { here, index });
      }
      const { here, index } = sections.get(tag);
      const { details, link } = operationOf(method, path, operation);
      const entry = element("li");
      entry.append(link);
      here.append(details);
      index.querySelector("ul").append(entry);
    }
  }
  list.replaceChildren(...[...sections.values()].map(({ here }) => here));
  byId("index").replaceChildren(...[...sections.values()].map(({ index }) => index));
  setText(status, `${operations.length} operations`);
  setText(byId("openai-base"), `${BASE}v1`);
  setText(byId("anthropic-base"), BASE.replace(/\/$/, ""));
  byId("search").addEventListener("input", search);
  search(); // the user may have typed before the document came
  addEventListener("hashchange", openNamed);
  openNamed();
}

/** Fetches the document until it has arrived. */
async function load() {
  for (let waitMs = FIRST_WAIT_MS; ; waitMs = Math.min(2 * waitMs, MAX_WAIT_MS)) {
    try {
      const found = await look("openapi.json");
      await findModel();
      status.classList.remove("bad");
      return show(found);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error;
      status.classList.add("bad");
      if (!error.isPassing) return setText(status, error.message);
      setText(status, `${error.message} Trying again…`);
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

void load();
