/*
 * The AI SDK over Penstock without a server of your own: answers resume after a reload.
 *
 *     npm install penstock ai
 *     node examples/ai_chat.ts
 *
 * In a page the same transport is useChat's: `useChat({ id, transport, resume: true })`. Each answer
 * is a job in the background, whose id is in the page's localStorage until its end. This program
 * leaves an answer in its middle and reads it as a reloaded page does. PENSTOCK_URL and PENSTOCK_KEY
 * as in resume.ts.
 */
import { readUIMessageStream, type ChatTransport, type UIMessage } from 'ai';
import { Client } from 'penstock';
import { PenstockChatTransport } from 'penstock/ai';

const parameters = { instructions: 'You answer in one sentence.', max_tokens: 100 };
const transport: ChatTransport<UIMessage> = new PenstockChatTransport(new Client(), { parameters });
const question: UIMessage = {
  id: '1',
  role: 'user',
  parts: [{ type: 'text', text: process.argv.slice(2).join(' ') || 'What is a penstock?' }],
};
const started = await transport.sendMessages({
  chatId: 'c1',
  trigger: 'submit-message',
  messageId: undefined,
  messages: [question],
  abortSignal: undefined,
});
await started.cancel(); // the page is closed, the job continues

const resumed = await transport.reconnectToStream({ chatId: 'c1' });
if (!resumed) throw new Error('the answer is gone');
let last: UIMessage | undefined;
for await (const message of readUIMessageStream({ stream: resumed })) last = message;
console.log(last?.parts.map((part) => (part.type === 'text' ? part.text : '')).join(''));
