// Agents of the AI SDK: node ai_agent_cases.mjs <base url> <provider> <model>
// All cases of one provider at once; says what became of each.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import {
  generateObject, generateText, jsonSchema, Output, stepCountIs, streamObject, streamText, tool,
  ToolLoopAgent,
} from 'ai';

const [base, kind, name] = process.argv.slice(1);
const at = { baseURL: `${base}/v1`, apiKey: 'none' };
const model = {
  compatible: () => createOpenAICompatible({
    ...at, name: 'penstock', includeUsage: true, supportsStructuredOutputs: true,
  })(name),
  chat: () => createOpenAI(at).chat(name),
  responses: () => createOpenAI(at)(name), // the provider's default
  anthropic: () => createAnthropic(at)(name),
}[kind]();
const ONE_CALL = {
  openai: { parallelToolCalls: false },
  penstock: { parallel_tool_calls: false },
  anthropic: { disableParallelToolUse: true },
};
// Else Anthropic's provider has an object written as a call by models whose names it does not know.
const BY_SCHEMA = { ...ONE_CALL, anthropic: { structuredOutputMode: 'outputFormat' } };
// A turn that has to call ends behind its second call.
const TWO_CALLS = { penstock: { min_tokens: 60, logit_bias: { 2: 100 } } };
const SHORT = { penstock: { min_tokens: 8, logit_bias: { 2: 100 } } };

const asked = {
  model, prompt: 'How deep is the water?', temperature: 0, maxOutputTokens: 400, maxRetries: 0,
  providerOptions: ONE_CALL,
};
const properties = {
  gate: { type: 'string', enum: ['north', 'south', 'weir'] },
  unit: { type: 'string', enum: ['metres', 'feet'] },
};
const reading = jsonSchema({
  type: 'object',
  properties: { ...properties, level: { type: 'integer', minimum: 0, maximum: 9 } },
  required: ['gate', 'unit', 'level'],
  additionalProperties: false,
});

function station() {
  const called = [];
  const read_gauge = tool({
    description: 'Reads a gauge.',
    inputSchema: jsonSchema({ type: 'object', properties, required: ['gate', 'unit'] }),
    execute: async (input) => { called.push(input); return 'seven metres'; },
  });
  return { called, tools: { read_gauge } };
}

// The first step has to call; the others may end.
const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'auto' });
const loop = { stopWhen: stepCountIs(4), prepareStep };

function told(called, steps, usage, text) {
  return {
    called, text,
    asked: steps.flatMap((step) => step.toolCalls.map((call) => call.input)),
    returned: steps.flatMap((step) => step.toolResults.map((result) => result.output)),
    reasons: steps.map((step) => step.finishReason),
    tokens: [usage.inputTokens, usage.outputTokens],
  };
}

const cases = {
  async agent() {
    const { called, tools } = station();
    const { prompt, ...settings } = asked;
    const agent = new ToolLoopAgent({ ...settings, ...loop, tools, instructions: 'You keep gates.' });
    const whole = await agent.generate({ prompt });
    return told(called, whole.steps, whole.totalUsage, whole.text);
  },

  async agentStreams() {
    const { called, tools } = station();
    const { prompt, ...settings } = asked;
    const agent = new ToolLoopAgent({ ...settings, ...loop, tools });
    const streamed = await agent.stream({ prompt });
    const kinds = new Set();
    let text = '';
    for await (const part of streamed.fullStream) {
      kinds.add(part.type);
      if (part.type === 'error') throw part.error;
      if (part.type === 'text-delta') text += part.text;
    }
    return {
      ...told(called, await streamed.steps, await streamed.totalUsage, text), kinds: [...kinds],
    };
  },

  async generates() {
    const { called, tools } = station();
    const whole = await generateText({ ...asked, ...loop, tools });
    return told(called, whole.steps, whole.totalUsage, whole.text);
  },

  async streams() {
    const { called, tools } = station();
    const errors = [];
    const streamed = streamText({
      ...asked, ...loop, tools, onError: ({ error }) => errors.push(String(error)),
    });
    let text = '';
    for await (const delta of streamed.textStream) text += delta;
    return { ...told(called, await streamed.steps, await streamed.totalUsage, text), errors };
  },

  async named() {
    const { called, tools } = station();
    const { providerOptions, ...settings } = asked;
    const toolChoice = { type: 'tool', toolName: 'read_gauge' };
    const whole = await generateText({ ...settings, tools, toolChoice });
    return told(called, whole.steps, whole.totalUsage, whole.text);
  },

  async object() {
    const whole = await generateObject({ ...asked, schema: reading, schemaName: 'reading' });
    const streamed = streamObject({ ...asked, schema: reading, schemaName: 'reading' });
    let pieces = 0;
    for await (const part of streamed.partialObjectStream) pieces += part !== undefined;
    return { whole: whole.object, streamed: await streamed.object, pieces };
  },

  async output() {
    const whole = await generateText({
      ...asked, providerOptions: BY_SCHEMA, output: Output.object({ schema: reading }),
    });
    return whole.output;
  },
};
if (kind === 'compatible') {
  cases.twoCalls = async () => {
    const { called, tools } = station();
    const whole = await generateText({
      ...asked, ...loop, tools, providerOptions: TWO_CALLS,
      prepareStep: ({ stepNumber }) => ({
        ...prepareStep({ stepNumber }), providerOptions: stepNumber === 0 ? TWO_CALLS : SHORT,
      }),
    });
    return told(called, whole.steps, whole.totalUsage, whole.text);
  };
}

async function outcome(work) {
  try {
    return await work();
  } catch (error) {
    return { raised: `${error.stack} ${error.responseBody ?? ''}` };
  }
}

const outcomes = await Promise.all(Object.values(cases).map(outcome));
console.log(JSON.stringify(Object.fromEntries(
  Object.keys(cases).map((key, index) => [key, outcomes[index]]),
)));
