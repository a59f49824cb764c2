// Opens a trace file, or a timeline, into a history.

import { History } from "./history.js";

const WORKER = "page/trace_worker.js";

// Reads a file and resolves to {history, summary, isTorn}.  `onProgress` gets the share read.
export function openTrace(file, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const worker = new Worker(WORKER, { type: "module" });
    const builder = new Builder();
    const end = (settle, value) => {
      worker.terminate();
      settle(value);
    };
    signal.addEventListener("abort", () => end(reject, new DOMException("cancelled", "AbortError")));
    worker.onerror = (event) => end(reject, new Error(event.message ?? "the worker failed"));
    worker.onmessage = ({ data }) => {
      if (data.error) return end(reject, new Error(data.error));
      try {
        builder.add(data.batches);
      } catch (error) {
        return end(reject, error);
      }
      onProgress(file.size ? data.read / file.size : 1);
      if (data.isDone) end(resolve, { history: builder.history, ...data });
      else worker.postMessage("taken");
    };
    worker.postMessage({ file });
  });
}

export class Builder {
  constructor() {
    this.history = null;
  }

  add(batches) {
    for (const batch of batches) {
      if (!this.history) {
        if (!batch.head) throw new Error("it does not begin with a head; is it the end of a file?");
        this.history = new History(batch.head, batch.now_ns);
      }
      this.history.add(batch);
    }
  }
}
