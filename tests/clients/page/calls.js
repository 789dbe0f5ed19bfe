// A page's own fetch, from another origin; `window.calls` tells a test what came.
const calls = {};

async function call(name, url, options) {
  const controller = new AbortController();
  const told = (calls[name] = { state: 'asking', status: null, text: '', error: null, headers: {} });
  told.abort = () => controller.abort();
  try {
    const answer = await fetch(url, { ...options, signal: controller.signal });
    told.status = answer.status;
    told.headers = Object.fromEntries(answer.headers);
    told.state = 'reading';
    const decoder = new TextDecoder();
    for (const reader = answer.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      told.text += decoder.decode(value, { stream: true });
    }
    told.state = 'read';
  } catch (error) {
    told.error = error.name;
    told.state = 'failed';
  }
}

async function ours(name, base, asked, parameters) {
  const told = (calls[name] = { state: 'asking', text: '', error: null });
  try {
    const { Client } = await import('/node_modules/penstock/dist/index.js');
    const client = new Client(base, { patienceMs: 20_000 });
    const stream = client.chat(asked, parameters);
    for await (const delta of stream) told.text += delta.text;
    told.answer = stream.answer;
    const wrong = await client.chat(asked, { ...parameters, model: 'nobody' }).result().catch((e) => e);
    told.error = [wrong.constructor.name, wrong.code];
    const leaving = new AbortController();
    const left = client.chat(asked, { ...parameters, max_tokens: 400 }, { signal: leaving.signal });
    await left.next();
    leaving.abort();
    await left.next().catch((error) => error);
    told.left = left.jobId;
    told.state = 'read';
  } catch (error) {
    told.error = `${error}`;
    told.state = 'failed';
  }
}

async function sdk(name, base, asked) {
  const told = (calls[name] = { state: 'asking', text: '', error: null });
  try {
    const { default: OpenAI } = await import('/node_modules/openai/index.mjs');
    const client = new OpenAI({
      baseURL: `${base}/v1`, apiKey: 'none', maxRetries: 0, dangerouslyAllowBrowser: true,
    });
    const stream = await client.chat.completions.create({ ...asked, stream: true });
    for await (const chunk of stream) told.text += chunk.choices[0]?.delta?.content ?? '';
    const wrong = await client.chat.completions.create({ ...asked, model: 'nobody' }).catch((e) => e);
    told.error = [wrong.constructor.name, wrong.code, wrong.requestID?.split('-')[0]];
    told.state = 'read';
  } catch (error) {
    told.error = `${error}`;
    told.state = 'failed';
  }
}

function source(name, url) {
  const told = (calls[name] = { state: 'asking', events: [] });
  const events = new EventSource(url);
  events.onmessage = ({ data }) => {
    told.events.push(data);
    if (data === '[DONE]') {
      events.close();
      told.state = 'read';
    }
  };
}

window.calls = calls;
window.call = call;
window.ours = ours;
window.sdk = sdk;
window.source = source;
