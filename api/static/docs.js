/** Shows the operations of /openapi.json: parameters, the fields of bodies, statuses. */

import { element, setText } from "./element.js";

const byId = (id) => document.getElementById(id);
const status = byId("status");
const list = byId("operations");

/** Returns the schema that a reference leads to. */
function resolved(schemas, schema) {
  return schema?.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
}

/** Returns a short text for a schema's type. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function described(title, rows) {
  if (!rows.length) return [];
  const terms = element("dl");
  for (const [name, text] of rows) {
    const term = element("dt");
    term.append(element("code", "", name));
    terms.append(term, element("dd", "", text));
  }
  return [element("h4", "", title), terms];
}

function fieldsOf(schemas, content) {
  const schema = resolved(schemas, Object.values(content ?? {})[0]?.schema);
  const required = new Set(schema?.required);
  return Object.entries(schema?.properties ?? {}).map(([name, field]) => {
    const text = [typeOf(field), required.has(name) ? "required" : "", field.description ?? ""];
    return [name, text.filter(Boolean).join(". ")];
  });
}

function operationOf(schemas, method, path, operation) {
  const details = element("details");
  const summary = element("summary");
  const name = element("code", "", path);
  summary.append(element("span", "method", method.toUpperCase()), name);
  const parameters = (operation.parameters ?? []).map((one) => [
    one.name,
    [`${one.in}, ${typeOf(one.schema)}`, one.description ?? ""].filter(Boolean).join(". "),
  ]);
  const responses = Object.entries(operation.responses).map(([code, response]) => [
    code,
    [response.description, ...Object.keys(response.content ?? {})].join(", "),
  ]);
  details.append(
    summary,
    element("p", "", operation.description ?? ""),
    ...described("Parameters", parameters),
    ...described("Body", fieldsOf(schemas, operation.requestBody?.content)),
    ...described("Response", fieldsOf(schemas, operation.responses["200"]?.content)),
    ...described("Statuses", responses),
  );
  return details;
}

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`status ${response.status}`);
  const { paths, components } = await response.json();
  const sections = new Map();
  for (const [path, item] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(item)) {
      const tag = operation.tags[0];
      if (!sections.has(tag)) {
        sections.set(tag, element("section"));
        sections.get(tag).append(element("h2", "", tag));
      }
      sections.get(tag).append(operationOf(components.schemas, method, path, operation));
    }
  }
  list.replaceChildren(...sections.values());
  setText(status, `${list.querySelectorAll("details").length} operations`);
}

show().catch((error) => {
  status.classList.add("bad");
  setText(status, `The document could not be loaded: ${error.message}`);
});
