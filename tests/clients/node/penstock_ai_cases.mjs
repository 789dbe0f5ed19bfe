import { AbstractChat } from 'ai';
import { Client } from 'penstock';
import { PenstockChatTransport } from 'penstock/ai';

const [urls, what, given] = process.argv.slice(1);
const { prompt, ...parameters } = JSON.parse(given);
const say = (value) => console.log(JSON.stringify(value));

// What useChat does in a page, without React: its state is an array.
class Chat extends AbstractChat {
  constructor({ messages = [], onText = () => {}, ...init }) {
    const state = {
      status: 'ready', error: undefined, messages,
      pushMessage: (message) => { state.messages = [...state.messages, message]; },
      popMessage: () => { state.messages = state.messages.slice(0, -1); },
      replaceMessage: (index, message) => {
        state.messages = state.messages.with?.(index, message)
          ?? state.messages.map((had, place) => (place === index ? message : had));
        onText(textOf(message));
      },
      snapshot: (value) => structuredClone(value),
    };
    super({ ...init, state });
  }
}
const textOf = (message) => message?.parts.map((part) => part.text ?? '').join('') ?? '';
const told = (chat) => ({
  roles: chat.messages.map((message) => message.role), text: textOf(chat.lastMessage), id: chat.lastMessage?.id,
  status: chat.status, error: chat.error?.message ?? null, parts: chat.lastMessage?.parts,
});

const jobs = new Map();
const storage = {
  getItem: (key) => jobs.get(key) ?? null,
  setItem: (key, id) => void jobs.set(key, id),
  removeItem: (key) => void jobs.delete(key),
};
// Each page has a client of its own, the storage outlives it.
const page = (init = {}) => new Chat({
  id: 'c1', transport: new PenstockChatTransport(new Client(urls), { storage, parameters }), ...init,
});

const cases = {
  async resume() { // says when some of the answer was read; the page is then loaded anew
    let isSaid = false;
    const first = page({ onText: (text) => {
      if (text.length >= 40 && !isSaid) {
        isSaid = true;
        say('some');
      }
    } });
    const reading = first.sendMessage({ text: prompt });
    while (!isSaid) await new Promise((resolve) => setTimeout(resolve, 5));
    const second = page({ messages: first.messages.filter((message) => message.role === 'user') });
    await Promise.all([reading, second.resumeStream()]);
    const third = page({ messages: [] });
    await third.resumeStream();
    const job = await new Client(urls).follow(first.lastMessage.id).result();
    say({ first: told(first), second: told(second), third: told(third), text: job.text, left: jobs.size });
  },
  async turns() {
    const chat = page();
    await chat.sendMessage({ text: prompt });
    await chat.sendMessage({ text: 'and again' });
    await chat.regenerate();
    say(told(chat));
  },
  async stop() {
    let id;
    const chat = page();
    const reading = chat.sendMessage({ text: prompt });
    while (!chat.lastMessage || chat.lastMessage.role === 'user') await new Promise((resolve) => setTimeout(resolve, 5));
    id = chat.lastMessage.id;
    await chat.stop();
    await reading;
    // The transport forgets the job when its cancel is confirmed.
    for (let look = 0; look < 400 && jobs.size; look += 1) await new Promise((resolve) => setTimeout(resolve, 5));
    say({ ...told(chat), job: (await new Client(urls).job(id)).status, left: jobs.size });
  },
  async fails() {
    const chat = page();
    await chat.sendMessage({ text: prompt });
    say(told(chat));
  },
  async tools() {
    const chat = page();
    await chat.sendMessage({ text: prompt });
    const call = chat.lastMessage.parts.find((part) => part.type.startsWith('tool-'));
    if (call) {
      await chat.addToolOutput({ tool: call.type.slice(5), toolCallId: call.toolCallId, output: { found: 7 } });
      await chat.sendMessage({ text: 'go on' });
    }
    say({ call, ...told(chat) });
  },
};
await cases[what]();
