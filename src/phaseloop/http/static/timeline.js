// A view of a history: which lanes there are, what time is in view, and what is at a place.

import {
  AXIS_HEIGHT, COHORT_HEIGHT, LABEL_WIDTH, PHASE_HEIGHT, Painter, QUEUE_HEIGHT,
} from "./paint.js";
import { describeLine, describeStretch, describeTurn } from "./words.js";

const GAP = 2;
const FRAME_MS = 33;
const NS_PER_PX_MIN = 1e4;
const LIVE_SPAN_NS = 30e9;
const LIVE_NS_PER_PX_MAX = 60e6; // on narrow screens rather less of the past
const STALE_MS = 1500; // the time runs on by itself for so long

export class Timeline {
  // `onChange` hears when the view has moved or was paused.
  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.onChange = onChange;
    this.history = null;
    this.isLive = true;
    this.isFollowing = true;
    this.nsPerPx = 0;
    this.fromNs = 0;
    this.cursor = null; // {lane, at}: what is pointed at
    this.beforeDraw = () => {};
    this.receivedMs = performance.now();
    this.drawnMs = 0;
    this.isScheduled = false;
    this.painter = new Painter(this);
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
  }

  show(history, isLive) {
    this.history = history;
    this.isLive = isLive;
    this.isFollowing = isLive;
    this.cursor = null;
    this.resize();
    if (isLive) {
      this.nsPerPx = Math.min(LIVE_SPAN_NS / this.width, LIVE_NS_PER_PX_MAX);
      this.follow();
    } else {
      this.fit();
    }
  }

  themeChanged() {
    this.painter.themeChanged();
    this.schedule();
  }

  // --- geometry ---------------------------------------------------------------------------------

  get laneHeight() {
    const slots = this.history ? this.history.head.slot_count : 1;
    return slots <= 8 ? 30 : slots <= 24 ? 22 : slots <= 40 ? 14 : 9;
  }

  get lanes() {
    const lanes = [];
    let y = AXIS_HEIGHT;
    const add = (kind, slot, height, name) => {
      lanes.push({ kind, slot, y, height, name });
      y += height + GAP;
    };
    if (!this.history) return lanes;
    if (!this.history.head.names) {
      add("cohort", -1, COHORT_HEIGHT, "cohort");
      add("phase", -1, PHASE_HEIGHT, "phase");
      add("queue", -1, QUEUE_HEIGHT, "queue");
    }
    for (let slot = 0; slot < this.history.head.slot_count; slot++) {
      add("slot", slot, this.laneHeight, this.history.head.names?.[slot] ?? `slot ${slot}`);
    }
    return lanes;
  }

  resize() {
    const lanes = this.lanes;
    const last = lanes[lanes.length - 1];
    const height = last ? last.y + last.height + GAP : 120;
    const ratio = window.devicePixelRatio || 1;
    const fullWidth = Math.max(240, this.canvas.parentElement.clientWidth);
    const before = this.width;
    this.width = fullWidth - LABEL_WIDTH;
    this.canvas.width = Math.round(fullWidth * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.painter.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (before && this.nsPerPx) this.nsPerPx *= before / this.width;
    this.draw();
  }

  nowNs() {
    if (!this.history) return 0;
    if (!this.isLive) return this.history.nowNs;
    const passed = Math.min(STALE_MS, performance.now() - this.receivedMs);
    return this.history.nowNs + passed * 1e6;
  }

  toX(at) {
    return LABEL_WIDTH + (at - this.fromNs) / this.nsPerPx;
  }

  toNs(x) {
    return this.fromNs + (x - LABEL_WIDTH) * this.nsPerPx;
  }

  get spanNs() {
    return this.width * this.nsPerPx;
  }

  // --- moving -----------------------------------------------------------------------------------

  received() {
    this.receivedMs = performance.now();
    this.schedule();
  }

  follow() {
    this.isFollowing = true;
    this.schedule();
    this.onChange();
  }

  pause() {
    this.isFollowing = false;
    this.onChange();
  }

  point(cursor) {
    this.cursor = cursor;
    this.schedule();
    this.onChange();
  }

  moveTo(fromNs) {
    const first = this.history.startNs;
    const last = Math.max(first, this.nowNs() - this.spanNs);
    this.fromNs = Math.min(last, Math.max(first, fromNs));
    this.isFollowing = false;
    this.schedule();
    this.onChange();
  }

  // Keeps the time at `x` where it is; while following, the present.
  zoom(factor, x = LABEL_WIDTH + this.width / 2) {
    if (!this.history) return;
    const at = this.toNs(x);
    const scale = this.possibleScale(this.nsPerPx * factor);
    this.nsPerPx = scale;
    if (!this.isFollowing) this.moveTo(at - (x - LABEL_WIDTH) * scale);
    this.schedule();
    this.onChange();
  }

  // Not so far that most of what is seen would be before the beginning.
  possibleScale(nsPerPx) {
    const whole = Math.max(LIVE_SPAN_NS, this.nowNs() - this.history.startNs);
    return Math.max(NS_PER_PX_MIN, Math.min(nsPerPx, (1.25 * whole) / this.width));
  }

  fit() {
    if (!this.history) return;
    this.nsPerPx = this.possibleScale((this.nowNs() - this.history.startNs) / this.width);
    if (!this.isFollowing) this.fromNs = this.history.startNs;
    this.schedule();
    this.onChange();
  }

  // Where the view is between the beginning (0) and the present (1).
  get place() {
    if (!this.history) return 1;
    const room = this.nowNs() - this.history.startNs - this.spanNs;
    return room <= 0 ? 1 : Math.min(1, (this.fromNs - this.history.startNs) / room);
  }

  set place(share) {
    const room = this.nowNs() - this.history.startNs - this.spanNs;
    this.moveTo(this.history.startNs + share * Math.max(0, room));
  }

  // --- what is there ----------------------------------------------------------------------------

  laneAt(y) {
    return this.lanes.findIndex((lane) => y >= lane.y && y < lane.y + lane.height + GAP);
  }

  // What a lane shows at a time, in words; null where nothing is known.
  describe(index, at) {
    const lane = this.lanes[index];
    if (!lane || at > this.nowNs() || at < this.history.startNs) return null;
    if (lane.kind === "phase" || lane.kind === "cohort") return describeTurn(this.history, at);
    if (lane.kind === "queue") return describeLine(this.history, at);
    return describeStretch(this.history, lane, at, this.nowNs());
  }

  // The nearest change in a lane before or after a time.
  change(index, at, direction) {
    const lane = this.lanes[index];
    const series =
      lane.kind === "phase" || lane.kind === "cohort" ? this.history.turns
      : lane.kind === "queue" ? this.history.queue
      : this.history.lanes[lane.slot];
    const here = series.find(at);
    const there = direction > 0 ? here + 1 : series.columns.at[here] < at ? here : here - 1;
    if (there >= series.length) return this.nowNs();
    return there < 0 ? this.history.startNs : series.columns.at[there];
  }

  // --- drawing ----------------------------------------------------------------------------------

  schedule() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame((ms) => this.frame(ms));
  }

  frame(ms) {
    this.isScheduled = false;
    // What moves by less than a pixel need not be drawn.
    const interval = Math.min(1000, Math.max(FRAME_MS, this.nsPerPx / 1e6));
    const due = ms - this.drawnMs >= interval || !this.isFollowing;
    if (due) {
      this.drawnMs = ms;
      this.draw();
    }
    const runs = performance.now() - this.receivedMs < STALE_MS;
    if (this.isLive && this.isFollowing && this.history && runs) this.schedule();
  }

  draw() {
    if (this.isFollowing) this.fromNs = this.nowNs() - this.spanNs;
    this.beforeDraw();
    this.painter.draw();
  }
}
