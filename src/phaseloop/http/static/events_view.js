// What the bare events of a trace tell without the scheduler's decisions, which no trace holds:
// when the engine worked, on prompts or on answers, and how much came in.

const EVENT_LINE = /^\{"line":"event"/;

export class EventsView {
  constructor(name) {
    this.name = name;
    this.events = 0;
    this.requests = 0;
    this.rounds = 0;
    this.generated = 0;
    this.lastNs = 0;
    this.records = [];
    this.head = null;
  }

  // Throws an Error for what is no trace.
  line(text) {
    const fields = JSON.parse(text);
    if (!this.head) return this.begin(fields);
    if (EVENT_LINE.test(text) || fields.event) this.event(fields.event ?? fields);
    return null;
  }

  begin(header) {
    if (!header.limits || !header.policy) throw new Error("its first line is no trace's header");
    const limits = header.limits;
    this.head = {
      version: 1,
      source: this.name,
      names: ["engine"],
      slot_count: 1,
      page_count: limits.page_count,
      page_length: limits.page_length ?? 256,
      batch_tokens: limits.batch_tokens,
      context_length: limits.context_length,
      looks: { prefill: "a round without tokens", decode: "a round that gave tokens", idle: "no round" },
      reasons: {},
      started: 0,
    };
    this.records.push(["slot", 0, 0, "idle", null, null, null, 0, []]);
    return this.head;
  }

  event(event) {
    this.events++;
    this.lastNs = Math.max(this.lastNs, event.at_ns);
    if (event.event === "RequestArrived") this.requests += event.requests.length;
    if (event.event !== "RoundCompleted") return;
    this.rounds++;
    let tokens = 0;
    let answers = false;
    for (const [kind, produced = 0, finish = false] of event.results) {
      if (kind !== "ok") continue;
      tokens += produced;
      answers ||= produced > 0 || finish;
    }
    this.generated += tokens;
    const from = Math.max(this.busyTo ?? 0, event.at_ns - event.duration_ns);
    this.records.push(["slot", from, 0, answers ? "decode" : "prefill", null, null, null, 0, []]);
    this.records.push(["slot", event.at_ns, 0, "idle", null, null, null, 0, []]);
    this.busyTo = event.at_ns;
  }

  take() {
    const records = this.records;
    this.records = [];
    return { now_ns: this.lastNs, records };
  }

  summary() {
    return { events: this.events, requests: this.requests, rounds: this.rounds, tokens: this.generated };
  }
}
