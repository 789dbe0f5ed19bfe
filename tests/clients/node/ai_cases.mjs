// What users of the AI SDK do: node ai_cases.mjs <base url> <case> <model> [system prompt]
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';

const [base, name, model, system] = process.argv.slice(1);
const provider = createOpenAICompatible({
  name: 'penstock', baseURL: `${base}/v1`, apiKey: 'none', includeUsage: true,
});
const asked = {
  model: provider(model),
  prompt: 'The keeper counts, héllo 😀.',
  maxOutputTokens: 60,
  maxRetries: 0,
  ...(system ? { system, stopSequences: ['|end|'], maxOutputTokens: 400 } : {}),
};
const say = (value) => console.log(JSON.stringify(value));
const called = [];
const tools = {
  depth: tool({
    description: 'How deep the water is.',
    inputSchema: jsonSchema({
      type: 'object', properties: { gate: { type: 'integer' } }, required: ['gate'],
    }),
    execute: async (input) => { called.push(input); return 'seven metres'; },
  }),
};

const cases = {
  async text() {
    const whole = await generateText(asked);
    const streamed = streamText(asked);
    let text = '';
    for await (const delta of streamed.textStream) text += delta;
    say({
      whole: whole.text, text, reasons: [whole.finishReason, await streamed.finishReason],
      usage: [whole.usage.outputTokens, (await streamed.usage).outputTokens],
    });
  },

  async tools() {
    const whole = await generateText({ ...asked, tools, stopWhen: stepCountIs(2) });
    const streamed = streamText({ ...asked, tools, stopWhen: stepCountIs(1) });
    const kinds = [];
    for await (const part of streamed.fullStream) kinds.push(part.type);
    say({
      called, kinds, steps: whole.steps.length,
      first: whole.steps[0].toolCalls.map((call) => [call.toolName, call.input]),
    });
  },

  async errors() {
    try {
      await generateText({ ...asked, model: provider('nobody') });
    } catch (error) {
      say({ name: error.name, status: error.statusCode, message: error.message });
    }
  },

  async abort() {
    const controller = new AbortController();
    const streamed = streamText({ ...asked, maxOutputTokens: 400, abortSignal: controller.signal });
    const kinds = new Set();
    for await (const part of streamed.fullStream) {
      kinds.add(part.type);
      if (part.type === 'text-delta') controller.abort();
    }
    say([...kinds]);
  },
};

await cases[name]();
