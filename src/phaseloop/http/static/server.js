// Talking to the server that served this page: the key, plain requests, streams of events.

const KEY = "phaseloop-key";

export class Unauthorized extends Error {}

export function keyInUse() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers() {
  const key = keyInUse();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Throws Unauthorized, or an Error whose message is the server's own.
async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // no JSON: the status says all there is
  }
  if (response.status === 401) throw new Unauthorized(message);
  throw Object.assign(new Error(message), { status: response.status });
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  return checked(response);
}

export async function open(path, signal) {
  return checked(await fetch(path, { headers: headers(), signal, cache: "no-store" }));
}

// The data of every event, as text.  Ends with the stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
