// Continue's adapters for OpenAI and Anthropic: what its editor extension asks.
// Says {openai: {texts, tokens}, anthropic: the same, completion, models}; each pair is whole, streamed.
import { constructLlmApi } from "@continuedev/openai-adapters";

const [base, model] = process.argv.slice(1);
const signal = new AbortController().signal;
const messages = [
  { role: "system", content: "You are terse." },
  { role: "user", content: "water the garden" },
];
const options = { model, max_tokens: 8, temperature: 0 };

async function joined(chunks, textOf) {
  let text = "";
  let usage = null;
  for await (const chunk of chunks) {
    text += textOf(chunk) ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

const result = {};
for (const provider of ["openai", "anthropic"]) {
  const api = constructLlmApi({ provider, apiBase: `${base}/v1/`, apiKey: "none" });
  const asked = { ...options, messages };
  const whole = await api.chatCompletionNonStream({ ...asked, stream: false }, signal);
  const streamed = await joined(
    api.chatCompletionStream({ ...asked, stream: true }, signal),
    (chunk) => chunk.choices[0]?.delta?.content,
  );
  const usages = [whole.usage, streamed.usage];
  result[provider] = {
    texts: [whole.choices[0].message.content, streamed.text],
    tokens: usages.map((usage) => [usage.prompt_tokens, usage.completion_tokens]),
  };
}
const api = constructLlmApi({ provider: "openai", apiBase: `${base}/v1/`, apiKey: "none" });
const completion = api.completionStream({ ...options, prompt: "water", stream: true }, signal);
result.completion = (await joined(completion, (chunk) => chunk.choices[0]?.text)).text;
result.models = (await api.list()).map((listed) => listed.id);
console.log(JSON.stringify(result));
process.exit(0); // it keeps sockets open
