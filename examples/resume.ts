/*
 * A stream that resumes by itself after a cut connection, a killed frontend, a killed worker.
 *
 *     npm install penstock
 *     PENSTOCK_URL=http://127.0.0.1:8000,http://127.0.0.1:8001 node examples/resume.ts
 *
 * Node 22.18 runs TypeScript as it is. Kill a process of the service meanwhile: the text pauses and
 * resumes, each token once. Ctrl-C cancels the job. PENSTOCK_KEY is a key, where the service asks
 * for one.
 */
import { Client, PenstockError } from 'penstock';

const question = process.argv.slice(2).join(' ') || 'What is a penstock?';
const stopping = new AbortController();
process.once('SIGINT', () => stopping.abort());
try {
  const stream = new Client().chat(question, { max_tokens: 200 }, { signal: stopping.signal });
  for await (const delta of stream) process.stdout.write(delta.text);
  console.log(`\n${stream.jobId}: ${stream.answer.usage.completion_tokens} tokens`);
} catch (error) {
  if (!stopping.signal.aborted && !(error instanceof PenstockError)) throw error;
  console.error(`${error}`);
  process.exitCode = 1;
}
