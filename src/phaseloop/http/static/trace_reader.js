// Reads a file of lines in pieces, as a timeline that phaseloop has prepared or as a raw trace.

import { EventsView } from "./events_view.js";

const LINE_MAX = 64 << 20;
const PIECE_LINES = 2000;
const TIMELINE_LINE = /^\{"now_ns":/;

// Yields {batches, read, line}: batches with the first one's head, bytes read so far.  Raises an
// Error that names the line.  A torn last line is left out, as by `phaseloop replay`.
export async function* readTrace(stream, name) {
  const reader = new LineReader(name);
  for await (const piece of stream) {
    yield* reader.push(piece);
  }
  yield* reader.end();
}

export class LineReader {
  constructor(name) {
    this.name = name;
    this.decoder = new TextDecoder();
    this.rest = "";
    this.read = 0;
    this.count = 0;
    this.view = null; // of a raw trace
    this.isKnown = false;
  }

  push(bytes) {
    this.read += bytes.length;
    return this.pushText(this.decoder.decode(bytes, { stream: true }));
  }

  *pushText(text) {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    if (this.rest.length > LINE_MAX) throw new Error(`${this.name}, line ${this.count + 1}: too long`);
    for (let from = 0; from < lines.length; from += PIECE_LINES) {
      yield this.take(lines.slice(from, from + PIECE_LINES));
    }
    if (!lines.length) yield { batches: [], read: this.read };
  }

  *end() {
    let isTorn = false;
    if (this.rest.trim()) {
      try {
        yield this.take([this.rest]);
      } catch (error) {
        if (this.count <= 1) throw error;
        isTorn = true;
      }
    }
    if (!this.isKnown) throw new Error(`${this.name} is empty`);
    yield { batches: [], read: this.read, summary: this.view?.summary() ?? null, isTorn, isDone: true };
  }

  take(lines) {
    const batches = [];
    for (const line of lines) {
      this.count++;
      if (!line.trim()) continue;
      try {
        this.takeLine(line, batches);
      } catch (error) {
        throw new Error(`${this.name}, line ${this.count}: ${error.message}`);
      }
    }
    if (this.view) batches.push(this.view.take());
    return { batches, read: this.read };
  }

  takeLine(line, batches) {
    if (!this.isKnown) {
      this.isKnown = true;
      if (!TIMELINE_LINE.test(line)) this.view = new EventsView(this.name);
    }
    if (!this.view) {
      batches.push(checked(JSON.parse(line)));
      return;
    }
    const head = this.view.line(line);
    if (head) batches.push({ now_ns: 0, records: [], head });
  }
}

function checked(batch) {
  if (!Number.isFinite(batch.now_ns) || !Array.isArray(batch.records)) {
    throw new Error("it is no line of a timeline");
  }
  return batch;
}
