// The chat: one conversation, streamed.  Whatever a model or a person wrote is set as text, never
// as markup.

import { Unauthorized, events, post } from "./server.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  // `onLocked` is called when the server wants a key.
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.messages = [];
    this.stopping = null;
    this.list = $("messages");
    this.status = $("chat-status");
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("stop").addEventListener("click", () => this.stopping?.abort());
    $("again").addEventListener("click", () => this.regenerate());
    $("chat-new").addEventListener("click", () => this.clear());
  }

  clear() {
    this.stopping?.abort();
    this.messages = [];
    this.list.replaceChildren();
    this.status.textContent = "";
    this.showButtons();
    $("prompt").focus();
  }

  send() {
    const prompt = $("prompt");
    const text = prompt.value.trim();
    if (!text || this.stopping) return;
    prompt.value = "";
    if (this.messages.at(-1)?.role === "user") this.messages.pop(); // it never got an answer
    this.messages.push({ role: "user", content: text });
    this.list.append(article("user", "You", text).item);
    this.answer();
  }

  regenerate() {
    if (this.stopping) return;
    if (this.messages.at(-1)?.role === "assistant") {
      this.messages.pop();
      this.list.lastElementChild?.remove();
    }
    this.list.querySelector(".failed:last-child")?.remove();
    if (this.messages.length) this.answer();
  }

  async answer() {
    const shown = article("assistant", "Answer", "");
    this.list.append(shown.item);
    this.stopping = new AbortController();
    this.showButtons();
    this.status.textContent = "waiting for the engine";
    const answer = new Answer(shown, (text) => (this.status.textContent = text));
    try {
      const response = await post("v1/chat/completions", this.body(), this.stopping.signal);
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        answer.take(JSON.parse(data));
      }
      this.status.textContent = `answer complete, ${answer.tokens} tokens`;
    } catch (error) {
      this.failed(error, shown, answer);
    }
    if (answer.text || answer.thoughts) {
      this.messages.push({ role: "assistant", content: answer.text });
    }
    this.stopping = null;
    this.showButtons();
  }

  failed(error, shown, answer) {
    if (error.name === "AbortError") {
      this.status.textContent = "stopped";
      answer.note("stopped by you");
      if (!answer.text) shown.item.classList.add("failed");
      return;
    }
    if (error instanceof Unauthorized) this.onLocked();
    this.status.textContent = "";
    shown.item.classList.add("failed");
    answer.note(error.message);
  }

  body() {
    const body = { stream: true, return_progress: true, messages: [...this.messages] };
    const system = $("system").value.trim();
    if (system) body.messages.unshift({ role: "system", content: system });
    const fields = { temperature: "temperature", max_tokens: "max-tokens", seed: "seed" };
    for (const [name, id] of Object.entries(fields)) {
      const value = $(id).value;
      if (value !== "") body[name] = Number(value);
    }
    return body;
  }

  showButtons() {
    const isBusy = this.stopping !== null;
    const hadFocus = document.activeElement === $("stop");
    $("stop").hidden = !isBusy;
    $("send").hidden = isBusy;
    $("again").hidden = isBusy || !this.messages.length;
    if (hadFocus && !isBusy) $("prompt").focus();
  }
}

// One answer while it comes.
class Answer {
  constructor(shown, say) {
    this.shown = shown;
    this.say = say;
    this.text = "";
    this.thoughts = "";
    this.tokens = 0;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const progress = chunk.prompt_progress;
    if (progress) this.say(`prompt: ${progress.processed} of ${progress.total} tokens`);
    const delta = chunk.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) {
      if (!this.text) this.say("generating");
      this.tokens++;
      this.text += delta.content;
      follow(this.shown.item, () => this.shown.text.firstChild.appendData(delta.content));
    }
    if (chunk.timings) {
      this.tokens = chunk.timings.predicted_n;
      follow(this.shown.item, () => this.note(...figures(chunk.timings, chunk.phaseloop)));
    }
  }

  think(text) {
    this.thoughts += text;
    if (!this.shown.thoughts) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "Thoughts";
      this.shown.thoughts = element("p", "text");
      details.append(summary, this.shown.thoughts);
      this.shown.text.before(details);
    }
    this.shown.thoughts.firstChild.appendData(text);
  }

  note(...lines) {
    this.shown.figures.replaceChildren(...lines.map((line) => element("span", "", line)));
  }
}

function figures(timings, spans) {
  const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
  const cached = timings.cache_n ? `, ${timings.cache_n} cached` : "";
  const lines = [
    `${timings.predicted_n} tokens, ${rate(timings.predicted_per_second)}/s`,
    `prompt ${timings.prompt_n}, ${rate(timings.prompt_per_second)}/s${cached}`,
  ];
  if (!spans) return lines;
  const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(0)} ms`);
  lines.push(`queue ${ms(spans.queue_ms)}`, `prefill ${ms(spans.prefill_ms)}`);
  lines.push(`barrier ${ms(spans.barrier_wait_ms)}`, `decode ${ms(spans.decode_ms)}`);
  if (spans.cohort != null) lines.push(`cohort ${spans.cohort}`);
  return lines;
}

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(text); // one text node, also of nothing: what comes later is added to it
  return made;
}

function article(kind, title, text) {
  const item = element("li", kind);
  const body = element("p", "text", text);
  const notes = element("p", "figures");
  item.append(element("h3", "", title), body, notes);
  return { item, text: body, figures: notes, thoughts: null };
}

// Keeps the end in view if it was.
function follow(item, change) {
  const list = item.parentElement;
  const isAtEnd = !list || list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  change();
  if (list && isAtEnd) list.scrollTop = list.scrollHeight;
}
