// What users of OpenAI's SDK for Node do: node openai_cases.mjs <base url> <case> <model> [options]
import OpenAI from 'openai';
import readline from 'node:readline';

const [base, name, model, options = '{}'] = process.argv.slice(1);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: 'none', maxRetries: 0 });
const asked = { model, messages: [{ role: 'user', content: 'The keeper counts, héllo 😀.' }], ...JSON.parse(options) };
const say = (value) => console.log(JSON.stringify(value));

async function cue() {
  const lines = readline.createInterface({ input: process.stdin });
  for await (const line of lines) {
    lines.close();
    return line;
  }
}

function told(error) {
  return {
    class: error.constructor.name,
    status: error.status ?? null,
    code: error.code ?? null,
    type: error.type ?? null,
    param: error.param ?? null,
    message: error.message,
    requestID: error.requestID ?? null,
  };
}

async function caught(work) {
  try {
    await work();
  } catch (error) {
    return told(error);
  }
  return null;
}

const cases = {
  async whole() {
    const { data, request_id } = await client.chat.completions.create(asked).withResponse();
    say({ id: data.id, request_id, choice: data.choices[0], usage: data.usage });
  },

  async stream() {
    const chunks = [];
    const stream = await client.chat.completions.create({
      ...asked, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) chunks.push(chunk);
    say(chunks);
  },

  async helper() {
    const seen = [];
    const stream = client.chat.completions.stream(asked)
      .on('content', (delta) => seen.push(delta));
    const final = await stream.finalChatCompletion();
    say({ seen: seen.join(''), content: final.choices[0].message.content, id: final.id });
  },

  async completions() {
    const texts = [];
    const { messages, ...rest } = asked;
    const stream = await client.completions.create({ ...rest, prompt: 'The keeper', stream: true });
    for await (const chunk of stream) texts.push(chunk.choices[0].text);
    const whole = await client.completions.create({ ...rest, prompt: 'The keeper' });
    say({ streamed: texts.join(''), whole: whole.choices[0].text });
  },

  async responses() {
    const { messages, max_tokens, ...rest } = asked;
    const body = { ...rest, input: 'The keeper counts.', max_output_tokens: max_tokens };
    const whole = await client.responses.create(body);
    const numbers = [];
    let text = '';
    for await (const event of await client.responses.create({ ...body, stream: true })) {
      numbers.push(event.sequence_number);
      if (event.type === 'response.output_text.delta') text += event.delta;
    }
    say({ whole: whole.output_text, streamed: text, numbers });
  },

  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    say({ ids, retrieved: (await client.models.retrieve(model)).id });
  },

  // Leaves the loop by itself after a few chunks.
  async breaks() {
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    let chunks = 0;
    let id;
    for await (const chunk of stream) {
      id = chunk.id;
      chunks += 1;
      if (chunks === 4) break;
    }
    say({ id, chunks });
    await cue(); // so that the end of the process is not what closes the connection
  },

  // Is told from outside when to abort; says what became of it.
  async abort_stream() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create(
      { ...asked, stream: true }, { signal: controller.signal },
    );
    say('begun');
    cue().then(() => controller.abort());
    let chunks = 0;
    const error = await caught(async () => {
      for await (const chunk of stream) chunks += chunk.choices.length;
    });
    say({ chunks, error });
    await cue();
  },

  async abort_whole() {
    const controller = new AbortController();
    const answer = client.chat.completions.create(asked, { signal: controller.signal });
    say('begun');
    cue().then(() => controller.abort());
    say({ error: await caught(() => answer) });
    await cue();
  },

  async errors() {
    const wrong = { ...asked, temperature: 9 };
    say({
      bad: await caught(() => client.chat.completions.create(wrong)),
      badStream: await caught(() => client.chat.completions.create({ ...wrong, stream: true })),
      unknown: await caught(() => client.chat.completions.create({ ...asked, model: 'nobody' })),
      long: await caught(() => client.chat.completions.create(
        { ...asked, messages: [{ role: 'user', content: 'abc '.repeat(3000) }] },
      )),
      nowhere: await caught(() => client.get('/nowhere')),
      isBad: (await client.chat.completions.create(wrong).catch((e) => e)) instanceof OpenAI.BadRequestError,
    });
  },

  // The job fails after its first tokens.
  async fails() {
    let chunks = 0;
    const streamed = await caught(async () => {
      for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
        chunks += chunk.choices.length;
      }
    });
    say({ chunks, streamed, whole: await caught(() => client.chat.completions.create(asked)) });
  },

  async run_tools() {
    const called = [];
    const runner = client.chat.completions.runTools(
      {
        ...asked,
        tools: [{
          type: 'function',
          function: {
            name: 'depth',
            description: 'How deep the water is.',
            parse: JSON.parse,
            parameters: { type: 'object', properties: { gate: { type: 'integer' } }, required: ['gate'] },
            function: (input) => { called.push(input); return 'seven metres'; },
          },
        }],
        ...(JSON.parse(options).stream ? { stream: true } : {}),
      },
      { maxChatCompletions: 2 },
    );
    await runner.done().catch(() => null);
    say({ called, roles: runner.messages.map((message) => message.role) });
  },

  async tool_deltas() {
    const calls = {};
    let finish = null;
    const tools = [{ type: 'function', function: { name: 'depth', parameters: { type: 'object' } } }];
    for await (const chunk of await client.chat.completions.create({ ...asked, tools, stream: true })) {
      const [choice] = chunk.choices;
      finish = choice.finish_reason ?? finish;
      for (const call of choice.delta.tool_calls ?? []) {
        calls[call.index] ??= { id: call.id, name: call.function.name, arguments: '' };
        calls[call.index].arguments += call.function.arguments ?? '';
      }
    }
    say({ calls, finish });
  },
};

await cases[name]();
process.stdin.destroy();
