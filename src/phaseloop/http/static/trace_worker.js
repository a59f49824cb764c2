// Reads a dropped file away from the page, which stays responsive.  One file per worker.  After each
// piece it waits until the page has taken it, so that no more than one is ever under way.

import { readTrace } from "./trace_reader.js";

let taken = () => {};

async function* pieces(stream) {
  const reader = stream.getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function run(file) {
  try {
    for await (const part of readTrace(pieces(file.stream()), file.name)) {
      const isTaken = new Promise((resolve) => (taken = resolve));
      postMessage(part);
      await isTaken;
    }
  } catch (error) {
    postMessage({ error: error.message });
  }
}

onmessage = ({ data }) => {
  if (data === "taken") taken();
  else run(data.file);
};
