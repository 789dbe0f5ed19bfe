/** Shows JSON schemas: types, bounds, defaults, and what objects have inside. */

import { element } from "./element.js";

let schemas = {};

/** Sets the schemas that references lead to. */
export const useSchemas = (known) => (schemas = known);

/** Returns the schema that a reference leads to. */
export const resolved = (schema) => (schema?.$ref ? schemas[nameOf(schema)] : schema);

// The name of a schema, without the module that distinguishes two of a name.
const nameOf = (schema) => schema.$ref.split("/").pop();
const shortName = (schema) => nameOf(schema).split("__").pop();

/** Returns the alternatives of a schema, but null; [schema] if it has none. */
function branchesOf(schema) {
  const alternatives = schema.anyOf ?? schema.oneOf;
  return alternatives
    ? alternatives.filter(({ type }) => type !== "null").flatMap(branchesOf)
    : [schema];
}

/** Returns a short text for a schema's type. */
export function typeOf(schema) {
  const branches = branchesOf(schema);
  if (branches.length !== 1 || branches[0] !== schema) return branches.map(typeOf).join(" or ");
  if (schema.$ref) {
    const { type, enum: values } = resolved(schema);
    return values || type !== "object" ? typeOf(resolved(schema)) : shortName(schema);
  }
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

const BOUNDS = [
  ["minimum", "maximum", ""],
  ["minLength", "maxLength", " characters"],
  ["minItems", "maxItems", " entries"],
  ["minProperties", "maxProperties", " members"],
];

function bound(least, most, unit) {
  if (least === undefined && most === undefined) return [];
  if (least === undefined) return [`at most ${most}${unit}`];
  return [most === undefined ? `at least ${least}${unit}` : `${least} to ${most}${unit}`];
}

/** Returns a text for the bounds of a schema; "" if it has none. */
function boundsOf(schema) {
  const found = branchesOf(schema).flatMap((branch) => [
    ...BOUNDS.flatMap(([least, most, unit]) => bound(branch[least], branch[most], unit)),
    ...(branch.pattern ? [`matches ${branch.pattern}`] : []),
  ]);
  return [...new Set(found)].join(", ");
}

/** Returns references to the objects that a value may be or contain. */
function innerOf(schema) {
  if (schema.$ref) return resolved(schema).properties ? [schema] : [];
  if (schema.type === "array") return innerOf(schema.items ?? {});
  const branches = branchesOf(schema);
  return branches[0] === schema ? [] : branches.flatMap(innerOf);
}

/** Members of objects, made when a reader opens them: an object may contain itself. */
function innerDetails(reference) {
  const { description, properties, required } = resolved(reference);
  const details = element("details");
  details.append(element("summary", "", `Members of ${shortName(reference)}`));
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    if (description) details.append(element("p", "", description));
    details.append(parameterList(Object.entries(properties), required));
  });
  return details;
}

/** A list of parameters with type, bounds, default and description. `parameters`: name, schema. */
export function parameterList(parameters, required = []) {
  const list = element("dl");
  for (const [name, schema] of parameters) {
    const term = element("dt");
    term.append(element("code", "", name), element("span", "", typeOf(schema)));
    if (required.includes(name)) term.append(element("span", "required", "required"));
    const bounds = boundsOf(schema);
    if (bounds) term.append(element("span", "", bounds));
    if (schema.default !== undefined && schema.default !== null && schema.default !== "") {
      term.append(element("span", "", `default ${JSON.stringify(schema.default)}`));
    }
    const description = element("dd");
    description.append(withCode(schema.description ?? ""));
    for (const example of schema.examples ?? []) {
      description.append(" Example: ", element("code", "", JSON.stringify(example)));
    }
    description.append(...innerOf(schema).map(innerDetails));
    list.append(term, description);
  }
  return list;
}

/** Text whose parts in backquotes are code. */
export function withCode(text) {
  const shown = document.createDocumentFragment();
  text.split("`").forEach((part, index) => {
    shown.append(index % 2 ? element("code", "", part) : part);
  });
  return shown;
}
