/** An operation's curl command, and a form that sends it. */

import { copyButton } from "./clipboard.js";
import { element, setText } from "./element.js";
import { askForKey, keyHeaders } from "./key.js";

const MAX_OUTPUT_CHARS = 256 * 1024;
const FIND_TIMEOUT_MS = 5000;
const FORM = "multipart/form-data";
export const BASE = new URL(".", document.baseURI).href;

let model = null; // one that this server has, for examples

/** Takes a model of this server for the examples, if one can be listed; they do without one. */
export async function findModel() {
  const signal = AbortSignal.timeout(FIND_TIMEOUT_MS);
  try {
    const response = await fetch("v1/models", { headers: keyHeaders(), signal });
    model = response.ok ? ((await response.json()).data?.[0]?.id ?? null) : null;
  } catch {
    model = null;
  }
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function bodyText(media, value) {
  if (media === FORM) return value.file ?? "";
  const shown = model !== null && "model" in value ? { ...value, model } : value;
  return JSON.stringify(shown, null, 2);
}

function curl(method, address, media, body, hasKeys) {
  const parts = [`curl ${quoted(address)}`];
  if (method !== "get") parts[0] = `curl -X ${method.toUpperCase()} ${quoted(address)}`;
  if (method === "head") parts[0] = `curl -I ${quoted(address)}`;
  if (hasKeys && Object.keys(keyHeaders()).length) {
    parts.push('-H "Authorization: Bearer $PENSTOCK_API_KEY"');
  }
  if (media === FORM) parts.push("-F purpose=batch", "-F file=@rows.jsonl");
  else if (media) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  return parts.join(" \\\n  ");
}

/** Shows a response as it comes: its status, then its body. */
async function show(response, status, output) {
  setText(status, `${response.status} ${response.statusText}`.trim());
  const text = document.createTextNode("");
  output.replaceChildren(text);
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text.data += value.slice(0, MAX_OUTPUT_CHARS - text.length);
    if (text.length >= MAX_OUTPUT_CHARS) {
      text.data += "\n… the rest is not shown";
      await reader.cancel();
      break;
    }
  }
  if (response.headers.get("content-type")?.startsWith("application/json")) {
    try {
      text.data = JSON.stringify(JSON.parse(text.data), null, 2);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error; // the body was cut: it is shown as it is
    }
  }
}

function sentBody(media, text) {
  if (media !== FORM) return { body: text, headers: { "content-type": "application/json" } };
  const body = new FormData();
  body.set("purpose", "batch");
  body.set("file", new Blob([text]), "rows.jsonl");
  return { body, headers: {} };
}

/** The form of one operation: inputs for its parameters, its body, and the command that follows. */
export function tryForm(method, path, operation) {
  const [media, content] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
  const examples = Object.values(content?.examples ?? {});
  const form = element("form", "try");
  const fields = (operation.parameters ?? [])
    .filter((one) => one.in !== "header")
    .map((parameter) => {
      const label = element("label", "", `${parameter.name} `);
      const input = element("input");
      Object.assign(input, { required: parameter.required === true, autocomplete: "off" });
      label.append(input);
      return { parameter, input, label };
    });
  const inputs = element("div", "example");
  inputs.append(...fields.map((field) => field.label));
  const body = element("textarea");
  body.rows = 8;
  body.spellcheck = false;
  body.setAttribute("aria-label", media === FORM ? "The file's content" : "Body");
  const command = element("pre");

  function address() {
    let filled = path;
    const query = new URLSearchParams();
    for (const { parameter, input } of fields) {
      const place = `{${parameter.name}}`;
      if (parameter.in === "query") input.value && query.append(parameter.name, input.value);
      else if (input.value) filled = filled.replace(place, encodeURIComponent(input.value));
    }
    return BASE + filled.slice(1) + (query.size ? `?${query}` : "");
  }
  const hasKeys = "401" in operation.responses;
  const write = () => setText(command, curl(method, address(), media, body.value, hasKeys));
  form.addEventListener("input", write);

  const head = element("div", "example");
  if (examples.length > 1) {
    const label = element("label", "", "Example ");
    const choice = element("select");
    choice.append(...examples.map((example) => element("option", "", example.summary)));
    choice.addEventListener("input", () => {
      body.value = bodyText(media, examples[choice.selectedIndex].value);
      write();
    });
    label.append(choice);
    head.append(label);
  }
  if (media) body.value = bodyText(media, examples[0]?.value ?? {});
  head.append(copyButton("Copy the curl command", () => command.textContent));

  const send = element("button", "primary", "Send");
  const stop = element("button", "", "Stop");
  Object.assign(stop, { type: "button", hidden: true });
  const status = element("span");
  status.setAttribute("role", "status");
  const output = element("pre", "output");
  Object.assign(output, { hidden: true, tabIndex: 0 });
  output.setAttribute("role", "group");
  output.setAttribute("aria-label", "Response");
  const foot = element("div", "example");
  foot.append(send, stop, status);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const aborted = new AbortController();
    stop.onclick = () => aborted.abort();
    stop.hidden = !(send.disabled = true);
    output.hidden = false;
    output.replaceChildren();
    setText(status, "Sending…");
    try {
      const sent = media ? sentBody(media, body.value) : {};
      const response = await fetch(address(), {
        method: method.toUpperCase(),
        ...sent,
        headers: { ...sent.headers, ...keyHeaders() },
        signal: aborted.signal,
      });
      await show(response, status, output);
      if (response.status === 401) askForKey();
    } catch (error) {
      setText(status, error.name === "AbortError" ? "Stopped." : `Not sent: ${error.message}`);
    } finally {
      stop.hidden = !(send.disabled = false);
    }
  });
  write();
  if (fields.length) form.append(inputs);
  if (media) form.append(body);
  form.append(head, command, foot, output);
  return form;
}
