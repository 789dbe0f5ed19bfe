/** Shows a waiting job's position in the queue, and an estimate of its wait from its own pace. */

import { listLoading, loadingSentence } from "./loading.js";
import { getJob, listModels, ServiceError } from "./service.js";
import { duration, plural } from "./units.js";

const FIRST_LOOK_MS = 700; // most jobs have started by then
const MAX_LOOK_MS = 5000;

/** The sentence for a job whose model no worker serves now, but one loads in turn with others. */
function onDemandSentence(ahead, { status, estimated_wait_s: waitS }) {
  const place = ahead === 0 ? "next in the queue" : `${plural(ahead, "job")} ahead in the queue`;
  const when = `in about ${duration(1000 * waitS)}`;
  const does = status === "loading" ? "its model is served" : "a worker loads its model";
  return `Waiting: ${place}; ${does} ${when}.`;
}

/** The sentence for a job whose model no worker serves. */
async function unservedSentence(model) {
  const loading = (await listLoading()).find((worker) => worker.model === model);
  if (loading) return `Waiting for a worker. ${loadingSentence(loading)}.`;
  return "Waiting: no worker is alive. The next worker runs the job.";
}

/** The sentence for a job with `ahead` others in front. `pace`: jobs a millisecond; 0: unknown. */
function sentence(ahead, pace) {
  if (ahead === 0) return "Waiting: the next in the queue.";
  const place = `Waiting: ${plural(ahead, "job")} ahead in the queue`;
  return pace > 0 ? `${place}, about ${duration((ahead + 1) / pace)} at this pace.` : `${place}.`;
}

export class QueuePlace {
  #say;
  #timer = null;
  #first = null; // {ahead, ms} of the first look

  constructor(say) {
    this.#say = say;
  }

  /** Looks after a job, less often as it waits longer, until `stop`. */
  start(jobId, model) {
    if (this.#timer !== null) return;
    let waitMs = FIRST_LOOK_MS;
    const look = async () => {
      await this.#look(jobId, model);
      waitMs = Math.min(1.4 * waitMs, MAX_LOOK_MS);
      if (this.#timer !== null) this.#timer = setTimeout(look, waitMs);
    };
    this.#timer = setTimeout(look, waitMs);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #look(jobId, model) {
    try {
      const [job, models] = await Promise.all([getJob(jobId), listModels()]);
      const isWaiting = job.status === "queued" && job.queue_position !== null && !job.recovery;
      if (this.#timer === null || !isWaiting) return;
      const nowMs = performance.now();
      const ahead = job.queue_position;
      this.#first ??= { ahead, ms: nowMs };
      const pace = (this.#first.ahead - ahead) / (nowMs - this.#first.ms || 1);
      const found = models.find(({ id }) => id === model);
      const isOnDemand = ["loading", "on_demand"].includes(found?.status);
      let text = sentence(ahead, pace);
      if (job.queue_paused) text = `The queue is paused. ${sentence(ahead, 0)}`;
      else if (isOnDemand) text = onDemandSentence(ahead, found);
      else if (found?.is_served === false) text = await unservedSentence(model);
      if (this.#timer !== null) this.#say(text);
    } catch (error) {
      if (!(error instanceof ServiceError)) throw error; // the stream reports the lost connection
    }
  }
}
