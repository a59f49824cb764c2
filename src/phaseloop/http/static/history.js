// What is known of the past, in bounded memory: every stretch of the recent past, and shares of
// time per look in buckets for the longer one.  Times are nanoseconds of the server's clock.

import { LOOKS } from "./looks.js";

const UNKNOWN = 0;
const STRETCHES_MAX = 2_000_000; // of all slots together
const LANE_MIN = 4096;
const SERIES_MAX = 400_000;
const BUCKETS_MAX = 230_000;
const SHARES_MAX = 8_300_000; // bytes of one level
const WIDTHS = [250e6, 4e9, 64e9]; // ns; at 64 slots there is room for an hour, sixteen, and ten days
const LOOK_INDEX = new Map(LOOKS.map((look, index) => [look, index]));

// Numbers in columns, growing up to a bound; then the older half is forgotten.
export class Series {
  constructor(names, capacity) {
    this.names = names;
    this.capacity = capacity;
    this.length = 0;
    this.forgotten = false;
    this.columns = {};
    for (const name of names) this.columns[name] = new Float64Array(64);
  }

  push(values) {
    if (this.length === this.columns.at.length) this.makeRoom();
    for (let i = 0; i < this.names.length; i++) {
      this.columns[this.names[i]][this.length] = values[i];
    }
    this.length++;
  }

  makeRoom() {
    if (this.length < this.capacity) {
      for (const name of this.names) {
        const grown = new Float64Array(Math.min(this.capacity, this.length * 2));
        grown.set(this.columns[name]);
        this.columns[name] = grown;
      }
      return;
    }
    const half = this.length >> 1;
    for (const name of this.names) this.columns[name].copyWithin(0, half, this.length);
    this.length -= half;
    this.forgotten = true;
    this.onForget(half);
  }

  onForget() {}

  // How many entries there are between two times.
  count(from, to) {
    return this.find(to) - this.find(from);
  }

  // The last entry at or before a time, or -1.
  find(at) {
    const times = this.columns.at;
    let low = -1;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (times[middle] <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  oldest() {
    return this.length ? this.columns.at[0] : Infinity;
  }
}

const STRETCH = ["at", "look", "role", "reason", "request", "choice", "waits"];

class Lane extends Series {
  constructor(capacity) {
    super(STRETCH, capacity);
    this.lists = [null]; // what `waits` points to
  }

  onForget() {
    if (this.lists.length === 1) return;
    const waits = this.columns.waits;
    const kept = [null];
    for (let i = 0; i < this.length; i++) {
      if (waits[i]) waits[i] = kept.push(this.lists[waits[i]]) - 1;
    }
    this.lists = kept;
  }

  // A stretch that looks as the one before it, for the same reason, goes on.
  add(at, look, role, reason, request, choice, waitsFor) {
    const last = this.length - 1;
    const c = this.columns;
    const isSame =
      last >= 0 && c.look[last] === look && c.reason[last] === reason &&
      c.request[last] === request && c.choice[last] === choice &&
      !c.waits[last] && !waitsFor.length;
    if (isSame) return;
    const waits = waitsFor.length ? this.lists.push(waitsFor) - 1 : 0;
    this.push([at, look, role, reason, request, choice, waits]);
  }
}

// Shares of time per look, in buckets of one width: a ring for each slot.
class Level {
  constructor(width, slotCount) {
    this.width = width;
    this.looks = LOOKS.length;
    const affordable = Math.floor(SHARES_MAX / (slotCount * this.looks));
    this.buckets = Math.max(2, Math.min(BUCKETS_MAX, affordable));
    this.shares = new Uint8Array(slotCount * this.buckets * this.looks);
    this.lengths = new Uint32Array(this.buckets); // of the queue: the most of each bucket
    this.current = new Float64Array(slotCount * this.looks);
    this.first = 0; // the oldest bucket that is whole
    this.next = 0; // the bucket that is being filled
    this.to = 0;
  }

  begin(at) {
    this.first = this.next = Math.floor(at / this.width);
    this.to = at;
    this.current.fill(0);
    this.lengths[this.next % this.buckets] = 0;
  }

  // `standing` looks were so from where this stands to `to`; `length` is the queue's.
  advance(to, standing, length) {
    while (this.to < to) {
      const end = Math.min(to, (this.next + 1) * this.width);
      const duration = end - this.to;
      const { looks, current } = this;
      for (let slot = 0; slot < standing.length; slot++) {
        current[slot * looks + standing[slot]] += duration;
      }
      const place = this.next % this.buckets;
      this.lengths[place] = Math.max(this.lengths[place], length);
      this.to = end;
      if (end === (this.next + 1) * this.width) this.commit();
    }
  }

  commit() {
    const place = this.next % this.buckets;
    const { looks, current, shares } = this;
    for (let i = 0; i < current.length; i++) {
      const slot = (i / looks) | 0;
      shares[(slot * this.buckets + place) * looks + (i % looks)] =
        Math.round((255 * current[i]) / this.width);
    }
    current.fill(0);
    this.next++;
    this.lengths[this.next % this.buckets] = 0;
    this.first = Math.max(this.first, this.next - this.buckets + 1);
  }

  // Adds a slot's shares of the buckets [from, to) to `sums`, 255 being all; how many there were.
  sum(slot, from, to, sums) {
    const start = Math.max(from, this.first);
    const end = Math.min(to, this.next);
    const { looks, shares } = this;
    for (let bucket = start; bucket < end; bucket++) {
      const base = (slot * this.buckets + (bucket % this.buckets)) * looks;
      for (let look = 0; look < looks; look++) sums[look] += shares[base + look];
    }
    const count = Math.max(0, end - start);
    return from <= this.next && this.next < to ? count + this.sumCurrent(slot, sums) : count;
  }

  // The same of the bucket that is being filled, which counts as far as it is full.
  sumCurrent(slot, sums) {
    let filled = 0;
    for (let look = 0; look < this.looks; look++) {
      const share = this.current[slot * this.looks + look] / this.width;
      sums[look] += 255 * share;
      filled += share;
    }
    return filled;
  }

  longest(from, to) {
    let most = 0;
    const end = Math.min(to, this.next + 1);
    for (let bucket = Math.max(from, this.first); bucket < end; bucket++) {
      most = Math.max(most, this.lengths[bucket % this.buckets]);
    }
    return most;
  }
}

// Words that come again and again, as numbers.
class Words {
  constructor() {
    this.list = [null];
    this.index = new Map([[null, 0]]);
  }

  of(word) {
    if (!this.index.has(word)) this.index.set(word, this.list.push(word) - 1);
    return this.index.get(word);
  }
}

export class History {
  constructor(head, atNs) {
    this.head = head;
    this.startNs = atNs;
    this.nowNs = atNs;
    this.words = new Words();
    const capacity = Math.max(LANE_MIN, Math.floor(STRETCHES_MAX / head.slot_count));
    this.lanes = Array.from({ length: head.slot_count }, () => new Lane(capacity));
    this.phaseRow = head.slot_count; // where the levels keep the phase, as if it were a slot
    this.standing = new Uint8Array(head.slot_count + 1).fill(UNKNOWN);
    this.turns = new Series(["at", "phase", "cohort", "sealed", "policy"], SERIES_MAX);
    this.queue = new Series(["at", "length", "reason", "request"], SERIES_MAX);
    this.figures = new Series(
      ["at", "prompt", "generated", "reserved", "idle", "saved"], SERIES_MAX,
    );
    this.ends = new Series(["at", "request", "slot", "reason"], SERIES_MAX);
    this.gaps = []; // [from, to], rare
    this.levels = WIDTHS.map((width) => new Level(width, head.slot_count + 1));
    for (const level of this.levels) level.begin(atNs);
  }

  // Batches of the same run, in order.
  add(batch) {
    if (batch.head && batch.now_ns > this.nowNs) this.addGap(this.nowNs, batch.now_ns);
    for (const record of batch.records) this.addRecord(record);
    this.advance(batch.now_ns);
  }

  addGap(from, to) {
    this.gaps.push([from, to]);
    if (this.gaps.length > 1000) this.gaps.shift();
    this.lanes.forEach((lane, slot) => {
      lane.add(from, UNKNOWN, 0, 0, -1, 0, []);
      this.standing[slot] = UNKNOWN;
    });
    this.standing[this.phaseRow] = UNKNOWN;
    this.queue.push([from, 0, 0, -1]);
    this.advance(to);
  }

  advance(to) {
    if (to <= this.nowNs) return;
    const length = this.queue.length ? this.queue.columns.length[this.queue.length - 1] : 0;
    for (const level of this.levels) level.advance(to, this.standing, length);
    this.nowNs = to;
  }

  addRecord(record) {
    const words = this.words;
    this.advance(record[1]);
    switch (record[0]) {
      case "slot": {
        const [, at, slot, look, role, reason, request, choice, waitsFor] = record;
        const known = LOOK_INDEX.get(look) ?? UNKNOWN;
        this.standing[slot] = known;
        this.lanes[slot].add(
          at, known, words.of(role), words.of(reason), request ?? -1, choice, waitsFor,
        );
        break;
      }
      case "phase": {
        const [, at, phase, cohort, sealed, policy] = record;
        this.standing[this.phaseRow] = LOOK_INDEX.get(phase) ?? UNKNOWN;
        this.turns.push([at, words.of(phase), cohort, sealed ? 1 : 0, words.of(policy)]);
        break;
      }
      case "queue": {
        const [, at, length, reason, request] = record;
        this.queue.push([at, length, words.of(reason), request ?? -1]);
        break;
      }
      case "figures":
        this.figures.push(record.slice(1));
        break;
      case "end": {
        const [, at, request, slot, reason] = record;
        this.ends.push([at, request, slot ?? -1, words.of(reason)]);
        break;
      }
    }
  }

  // The stretch of a slot by its index in the lane, with words instead of numbers.
  stretch(slot, index) {
    const lane = this.lanes[slot];
    if (index < 0 || index >= lane.length) return null;
    const c = lane.columns;
    return {
      from: c.at[index],
      to: index + 1 < lane.length ? c.at[index + 1] : this.nowNs,
      isLast: index + 1 === lane.length,
      look: LOOKS[c.look[index]],
      role: this.words.list[c.role[index]],
      reason: this.words.list[c.reason[index]],
      request: c.request[index],
      choice: c.choice[index],
      waitsFor: lane.lists[c.waits[index]] ?? [],
    };
  }

  turn(at = this.nowNs) {
    const i = this.turns.find(at);
    if (i < 0) return null;
    const c = this.turns.columns;
    const words = this.words.list;
    const [phase, policy] = [words[c.phase[i]], words[c.policy[i]]];
    return { from: c.at[i], phase, policy, cohort: c.cohort[i], sealed: c.sealed[i] === 1 };
  }

  line(at = this.nowNs) {
    const i = this.queue.find(at);
    if (i < 0) return null;
    const c = this.queue.columns;
    return { length: c.length[i], reason: this.words.list[c.reason[i]], request: c.request[i] };
  }

  figure(at = this.nowNs) {
    const i = this.figures.find(at);
    if (i < 0) return null;
    const c = this.figures.columns;
    return Object.fromEntries(this.figures.names.map((name) => [name, c[name][i]]));
  }

  // Tokens per second over the `spanNs` before a time.
  rates(at, spanNs) {
    const now = this.figure(at);
    const from = Math.max(this.startNs, at - spanNs);
    const before = this.figure(from);
    if (!now || !before || at <= from) return null;
    const seconds = (at - from) / 1e9;
    return {
      prompt: Math.max(0, now.prompt - before.prompt) / seconds,
      answer: Math.max(0, now.generated - before.generated) / seconds,
    };
  }

  // The narrowest level whose buckets reach back to a time, not narrower than a width.
  levelFor(width, from) {
    const first = Math.max(from, this.startNs);
    const reaching = this.levels.filter((level) => level.first * level.width <= first + level.width);
    const usable = reaching.length ? reaching : this.levels.slice(-1);
    const narrow = usable.filter((level) => level.width <= width);
    return narrow.length ? narrow[narrow.length - 1] : usable[0];
  }
}
