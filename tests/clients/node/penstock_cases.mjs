import { createInterface } from 'node:readline';
import { Client } from 'penstock';

const [urls, what, given] = process.argv.slice(1);
const { options = {}, ...asked } = JSON.parse(given ?? '{}');
const client = new Client(urls, { patienceMs: 20_000, ...options });
const cues = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (value) => console.log(JSON.stringify(value));
const wrong = (error) => ({
  class: error.constructor.name, name: error.name, message: error.message, code: error.code ?? null,
  jobId: error.jobId ?? '', status: error.status ?? null, param: error.param ?? null,
});

function begun({ dialect, prompt, ...parameters }, leaving) {
  if (dialect === 'chat') return client.chat(prompt, { return_token_ids: true, ...parameters }, leaving);
  if (dialect === 'completion') return client.complete(prompt, { return_token_ids: true, ...parameters }, leaving);
  return client.generate(prompt, parameters, leaving);
}

async function read(stream, onDelta = () => {}) {
  const deltas = [];
  for await (const delta of stream) {
    deltas.push(delta);
    onDelta(deltas);
  }
  return {
    text: deltas.filter((delta) => delta.index === 0).map((delta) => delta.text).join(''),
    tokens: deltas.filter((delta) => delta.index === 0).flatMap((delta) => delta.tokenIds),
    ends: deltas.map((delta) => delta.finishReason).filter((reason) => reason !== null),
    calls: deltas.flatMap((delta) => delta.toolCalls),
    answer: stream.answer,
  };
}

const cases = {
  async read() {
    say(await read(begun(asked)));
  },
  async watched() { // says when ten tokens were read
    let isSaid = false;
    say(await read(begun(asked), (deltas) => {
      if (!isSaid && deltas.flatMap((delta) => delta.tokenIds).length >= 10) say('ten');
      isSaid ||= deltas.flatMap((delta) => delta.tokenIds).length >= 10;
    }));
  },
  async leaves() { // by break, by close, by a signal
    const ids = [];
    for (const way of ['break', 'close', 'abort']) {
      const controller = new AbortController();
      const stream = begun(asked, { signal: controller.signal });
      let ended = null;
      try {
        for await (const delta of stream) {
          if (!delta.text) continue;
          if (way === 'break') break;
          if (way === 'close') stream.close();
          if (way === 'abort') controller.abort();
        }
      } catch (error) {
        ended = error.name;
      }
      ids.push([stream.jobId, ended]);
    }
    say(ids);
  },
  async fails() {
    say(wrong(await begun(asked).result().catch((error) => error)));
  },
  async cancelled() { // by somebody else
    const stream = begun(asked);
    await stream.next();
    const status = (await client.cancel(stream.jobId)).status;
    say([status, wrong(await stream.result().catch((error) => error))]);
  },
  async background() {
    const id = await client.submit(asked.prompt, asked.parameters);
    const first = await client.follow(id).result();
    const again = await client.follow(id).result();
    const raw = await client.follow(id, { raw: true }).result();
    const [newest] = await client.jobs({ state: 'finished', limit: 1 });
    say({ id, texts: [first.text, again.text, raw.text], reason: first.choices[0].finishReason, usage: first.usage, newest: newest.id, job: await client.job(id) });
  },
  async follows() { // says where it is, reads on at a cue
    const stream = client.follow(asked.id, { raw: asked.raw });
    say(await read(stream));
  },
  async recoveries() { // of one reader that asks, while another one does not
    const told = [];
    const asking = new Client(urls, { patienceMs: 20_000, onRecovery: (recovery) => { told.push(recovery); say(recovery); } });
    const id = await client.submit(asked.prompt, asked.parameters);
    const reads = [asking, client].map((one) => read(one.follow(id, { raw: asked.raw })).catch(wrong));
    say(id);
    const [asks, plain] = await Promise.all(reads);
    say({ told, asks, plain });
  },
  async throws() { // the error of the caller's own function
    const asking = new Client(urls, { onRecovery: () => { throw new RangeError('mine'); } });
    const stream = asking.chat(asked.prompt, asked.parameters);
    say('begun');
    say(wrong(await stream.result().catch((error) => error)));
    say((await client.job(stream.jobId)).status);
  },
  async calls() {
    const outcomes = [];
    for (const [method, path] of asked.requests) {
      outcomes.push(await client.call(method, path).then(() => null, wrong));
    }
    say({ outcomes, url: client.url });
  },
  async cues() {
    const stream = begun(asked);
    await stream.next();
    say(stream.jobId);
    await cues.next();
    say(await stream.result().then((answer) => answer.text, wrong));
  },
  async urls() {
    say(['ftp://x', '', 'http://'].map((url) => {
      try {
        return new Client([url]).url;
      } catch (error) {
        return error.constructor.name;
      }
    }));
  },
};
await cases[what]();
process.stdin.destroy();
