// The live feed: keeps a stream of batches open, and opens it again when it breaks.

import { Unauthorized, events, open } from "./server.js";

const RETRY_MS = [500, 1000, 2000, 5000];

export class Feed {
  // `onBatch` gets every batch; `onState` a word on the connection, and an error if there is one.
  constructor(onBatch, onState) {
    this.onBatch = onBatch;
    this.onState = onState;
    this.stopping = null;
  }

  start() {
    this.stop();
    this.stopping = new AbortController();
    this.run(this.stopping.signal);
  }

  stop() {
    this.stopping?.abort();
    this.stopping = null;
  }

  async run(signal) {
    let failures = 0;
    while (!signal.aborted) {
      let error = null;
      try {
        const response = await open("phase/events", signal);
        for await (const data of events(response)) {
          if (signal.aborted) return;
          failures = 0;
          this.onBatch(JSON.parse(data));
          this.onState("live", null);
        }
      } catch (caught) {
        error = caught;
      }
      if (signal.aborted) return;
      if (error instanceof Unauthorized) {
        this.onState("locked", error);
        return;
      }
      this.onState(error?.status === 503 ? "waiting" : "lost", error);
      const delay = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, delay));
    }
  }
}
