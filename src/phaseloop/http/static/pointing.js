// Moving about in the timeline: mouse, touch and keyboard.

import { readoutText, showTip } from "./panel.js";

const ZOOM_STEP = 1.6;

export class Pointing {
  constructor(timeline, togglePause) {
    this.timeline = timeline;
    this.canvas = timeline.canvas;
    this.togglePause = togglePause;
    this.pointers = new Map();
    this.mouse = null; // {x, y}: where it rests, while it points at something
    timeline.beforeDraw = () => this.refresh();
    const on = (name, handle, options) => this.canvas.addEventListener(name, handle, options);
    on("pointerdown", (event) => this.down(event));
    on("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) on(name, (event) => this.up(event));
    on("pointerleave", () => this.leave());
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("keydown", (event) => this.key(event));
    on("blur", () => this.leave());
  }

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event.offsetX);
  }

  up(event) {
    this.pointers.delete(event.pointerId);
  }

  leave() {
    this.mouse = null;
    if (document.activeElement === this.canvas) return;
    this.timeline.point(null);
    showTip(null);
  }

  move(event) {
    const { timeline, pointers } = this;
    const before = pointers.get(event.pointerId);
    if (before === undefined) return this.point(event.offsetX, event.offsetY);
    if (!timeline.history) return;
    const others = [...pointers.entries()].filter(([id]) => id !== event.pointerId);
    if (others.length === 1) {
      const fixed = others[0][1];
      const [old, now] = [Math.abs(before - fixed), Math.abs(event.offsetX - fixed)];
      if (old > 8 && now > 8) timeline.zoom(old / now, fixed);
    } else if (event.offsetX !== before) {
      timeline.moveTo(timeline.fromNs - (event.offsetX - before) * timeline.nsPerPx);
    }
    pointers.set(event.pointerId, event.offsetX);
  }

  point(x, y) {
    this.mouse = { x, y };
    this.timeline.point(this.readTip());
  }

  // Time runs on under a mouse that rests: what it points at changes.
  refresh() {
    if (this.mouse) this.timeline.cursor = this.readTip();
  }

  // Shows the tip for where the mouse is; returns the cursor for it.
  readTip() {
    const { timeline, mouse } = this;
    if (!timeline.history) return null;
    const lane = timeline.laneAt(mouse.y);
    const at = timeline.toNs(mouse.x);
    const shown = lane < 0 || at < timeline.fromNs ? null : timeline.describe(lane, at);
    showTip(shown, mouse.x, mouse.y, this.canvas.clientWidth);
    return shown ? { lane, at } : null;
  }

  wheel(event) {
    const { timeline } = this;
    if (!timeline.history) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      timeline.zoom(Math.exp(event.deltaY / 300), event.offsetX);
    } else if (event.deltaX || event.shiftKey) {
      event.preventDefault();
      const distance = event.deltaX || event.deltaY;
      timeline.moveTo(timeline.fromNs + distance * timeline.nsPerPx);
    }
  }

  key(event) {
    const { timeline } = this;
    if (!timeline.history || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.step(0, -1),
      ArrowRight: () => this.step(0, 1),
      ArrowUp: () => this.step(-1, 0),
      ArrowDown: () => this.step(1, 0),
      Home: () => this.toEnd(timeline.history.startNs),
      End: () => this.toEnd(timeline.nowNs()),
      "+": () => timeline.zoom(1 / ZOOM_STEP),
      "=": () => timeline.zoom(1 / ZOOM_STEP),
      "-": () => timeline.zoom(ZOOM_STEP),
      " ": () => this.togglePause(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    this.mouse = null; // the keyboard has the cursor now
    action();
  }

  // To another lane, or to the next change in this one; the view pauses and comes along.
  step(lanes, direction) {
    const { timeline } = this;
    const cursor = this.cursor();
    const last = timeline.lanes.length - 1;
    cursor.lane = Math.max(0, Math.min(last, cursor.lane + lanes));
    if (direction) cursor.at = timeline.change(cursor.lane, cursor.at, direction);
    const isSeen = cursor.at >= timeline.fromNs && cursor.at <= timeline.fromNs + timeline.spanNs;
    timeline.moveTo(isSeen ? timeline.fromNs : cursor.at - timeline.spanNs / 2);
    this.readOut(cursor);
  }

  toEnd(at) {
    const { timeline } = this;
    const cursor = this.cursor();
    cursor.at = at;
    if (timeline.isLive && at > timeline.history.startNs) timeline.follow();
    else timeline.moveTo(at);
    this.readOut(cursor);
  }

  // Where the keyboard is; at first in the middle of what is seen.
  cursor() {
    const { timeline } = this;
    const middle = timeline.fromNs + timeline.spanNs / 2;
    timeline.cursor ??= { lane: 0, at: Math.min(middle, timeline.nowNs()) };
    return timeline.cursor;
  }

  readOut(cursor) {
    const { timeline } = this;
    const shown = timeline.describe(cursor.lane, cursor.at);
    const text = readoutText(shown, timeline.history.startNs);
    document.getElementById("readout").textContent = text;
  }
}

export { ZOOM_STEP };
